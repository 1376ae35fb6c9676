"""Check that the bundle fits this image, and compile what its features need: python compile_kernels.py model.bundle"""

import sys
from contextlib import suppress

from ml_factory.data.synthetic import SyntheticSpec, synthetic_market
from ml_factory.errors import FactoryError
from ml_factory.inference.stream import PredictionStream
from ml_factory.serving.served_bundle import ServedBundle


def main(path: str) -> int:
    try:
        bundle = ServedBundle.load(path).bundle
    except FactoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    bars = synthetic_market(SyntheticSpec(days=3)).bars
    if not bundle.spec.market.has_volume:
        bars = bars.drop(columns="volume")
    with suppress(FactoryError):  # meta-labels, or features of the user's own that refuse synthetic bars
        PredictionStream(bundle, cold=True).push(bars.reset_index())
    print(f"{bundle.description['symbol']}: {bundle.description['model']} predicts with {bundle.engine}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
