"""Check that the bundle fits this image, and compile what its features need: python compile_kernels.py model.bundle"""

import sys

from ml_factory.errors import FactoryError
from ml_factory.serving.feed import ServedBundle


def main(path: str) -> int:
    try:
        bundle = ServedBundle.load(path).bundle
    except FactoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{bundle.description['symbol']}: {bundle.description['model']} predicts with {bundle.engine}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
