"""recipe compress: what each method removes, files that predict what was reported, the table, resume."""

import pytest
import torch

from ml_factory.errors import SettingsError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import prune_t5_state, run_compress, t5


def test_t5_without_heads_that_do_nothing_computes_the_same():
    config = t5.t5_config("builtin:tiny", 30)
    network = t5.new_t5(config, 0).eval()
    state = {name: value.clone() for name, value in network.model.state_dict().items()}
    for name, value in state.items():
        if name.endswith("Attention.o.weight"):
            value[:, 16:48] = 0  # heads 1 and 2
        if name.endswith("wo.weight"):
            value[:, ::2] = 0
    network.model.load_state_dict(state)
    sizes, kept = prune_t5_state(network.model, 0.5)
    assert sizes == {"num_heads": 2, "d_ff": 64}
    smaller = t5.new_t5(type(config)(**{**config.to_dict(), **sizes}), 1).eval()
    smaller.model.load_state_dict(kept)
    tokens, labels = torch.randint(2, 30, (3, 7)), torch.randint(2, 30, (3, 4))
    with torch.no_grad():
        assert torch.allclose(network(tokens, labels), smaller(tokens, labels), atol=1e-5)


@pytest.mark.parametrize(
    "text", ["int9", "magnitude:1.5", "int8_dynamic:0.5", "structured:0.5+int8_weights", "magnitude:x"]
)
def test_wrong_method_is_refused(text, tmp_path):
    with pytest.raises(SettingsError, match="methods"):
        run_compress(Workspace(tmp_path), "", methods=text)


def test_model_without_a_run_is_refused(tmp_path, call):
    code, _, err = call("recipe", "compress", "--model", tmp_path, "--workspace", tmp_path / "w")
    assert code == 2 and "no finished run" in err and "recipe t5" in err
    (tmp_path / "result.json").write_text('{"recipe": "resnet50"}')
    code, _, err = call("recipe", "compress", "--model", tmp_path, "--workspace", tmp_path / "w")
    assert code == 2 and "resnet50" in err and "wanted" in err
