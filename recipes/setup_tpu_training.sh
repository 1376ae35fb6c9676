#!/bin/sh
# The guide's script: ./setup_tpu_training.sh setup|resume|status|monitor|logs [N]|ssh [N]|stop|cleanup
# Its variables (PROJECT_ID, TPU_NAME, ZONE, ACCELERATOR_TYPE, BUCKET, WANDB_API_KEY, ...) are read from the
# environment, or from a YAML file: --config FILE after the verb. See docs/tpu.md.
here=$(cd "$(dirname "$0")/.." && pwd) || exit 1
CODE_DIR=${CODE_DIR:-$here}
export CODE_DIR
[ ! -x "$here/.venv/bin/python" ] || : "${PYTHON:=$here/.venv/bin/python}"
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m ml_factory tpu "$@"
