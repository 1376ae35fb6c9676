"""recipe compress: smaller variants of a T5 of recipe t5, each trained on, stored and loaded again; one table.

O rows of a weight, each with a scale of its own; N test rows.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.benchmark import Timer

from ml_factory.argument_checks import check_values
from ml_factory.errors import FactoryError, SettingsError, refuse_damaged_content
from ml_factory.evaluation.recipe_plots import draw_compression
from ml_factory.lazy_module import LazyModule
from ml_factory.recipes.run import RESULT, Status, open_recipe_run
from ml_factory.recipes.t5 import (
    T5Data,
    T5Network,
    label_loss,
    load_t5,
    new_t5,
    prepare_texts,
    share_interval,
)
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.serialization import read_state_file, write_state_file
from ml_factory.storage.workspace import Workspace
from ml_factory.training.device import Device, pick_device
from ml_factory.training.loop import Validation
from ml_factory.training.spec import TrainSpec

quantization, transformers = LazyModule("torchao.quantization"), LazyModule("transformers")

NAME, FILE, ORIGINAL = "compress", "variant.state", "original"
INT8 = {"int8_dynamic": "Int8DynamicActivationInt8WeightConfig", "int8_weights": "Int8WeightOnlyConfig"}  # of torchao
_PRUNING = r"(magnitude|structured)(?::(0?\.0*[1-9]\d*))?"  # and the share that is removed
TOLERANCE = 1e-5  # between the reported quality and that of the file
QUALITY = "accuracy"
_SMALL = 1024  # numbers of a weight that stays float32
_COLUMNS = (
    "method",
    "bytes",
    "parameters",
    "zeros",
    "p50_ms",
    "quality",
    "low",
    "high",
    "difference",
    "pareto",
    "note",
)


def _parse_method(text: str) -> tuple[str, float]:
    """Return a method's name and the share that it removes, 0 for a number format. Raises SettingsError."""
    pruned, formatted = (re.fullmatch(pattern, text) for pattern in (_PRUNING, "|".join(INT8)))
    if not pruned and not formatted:
        raise SettingsError("There is no such method", where="methods", got=repr(text),
                            wanted="magnitude:0.5, structured:0.5, int8_dynamic or int8_weights")  # fmt: skip
    return (pruned[1], float(pruned[2] or 0.5)) if pruned else (text, 0.0)


@dataclass(frozen=True)
class _Trained:
    """The finished run. fingerprint : of its weights and data."""

    training: TrainSpec
    data: T5Data
    network: T5Network
    device: Device
    fingerprint: str

    def build(self, sizes: Mapping[str, int]) -> T5Network:
        """Return a new network with other sizes than the trained one."""
        config = {**self.network.model.config.to_dict(), **sizes}
        return new_t5(transformers.T5Config(**config), self.training.seed)

    def outcomes(self, network: nn.Module) -> np.ndarray:
        """Return which test rows get their label, float64 (N,)."""
        predicted, _ = self.data.predict(network, self.device, self.training.eval_batch)
        return (self.data.parts["test"]["Label"].to_numpy() == np.array(predicted, object)).astype(np.float64)


def _open_trained(model: str, device: Device) -> _Trained:
    folder = Path(model).expanduser()
    facts = files.read_json(folder / RESULT) if model and files.is_file(folder / RESULT) else {}
    with refuse_damaged_content(
        SettingsError, "This result is damaged", where=folder / RESULT, next_step="train again"
    ):
        if facts.get("recipe") != "t5":
            raise SettingsError(
                "There is no finished run here", where="--model", wanted="the folder of a run of recipe t5",
                got=facts.get("recipe") or model or "none",
            )  # fmt: skip
        given, known = dict(facts["settings"]), facts["data"]
        training = TrainSpec(**given.pop("training"))
    data = prepare_texts(device, training.seed, **given)
    if data.fingerprint != known:
        raise SettingsError("The texts are no longer those of the training", where=folder, got=data.fingerprint,
                            wanted=known, next_step="train again")  # fmt: skip
    fingerprint = fingerprint_json([files.sha256(folder / "model" / "model.safetensors"), data.fingerprint])[:16]
    return _Trained(training, data, load_t5(str(folder / "model")), device, fingerprint)


def run_compress(
    workspace: Workspace, model: str, *, methods: str = "magnitude:0.5,structured:0.5,int8_dynamic,int8_weights",
    recovery_epochs: int = 1, recovery_rate: float = 0.3, rounds: int = 60, device: str = "auto", threads: int = 0,
    fresh: bool = False, on_status: Status = print,
) -> dict[str, Any]:  # fmt: skip
    """Make every variant, or load those that are finished; measure all of them; return the table.

    model : folder of a finished run of recipe t5.
    methods : such as magnitude:0.5, structured:0.5 or int8_dynamic, separated by commas.
    recovery_epochs : of training after pruning, at recovery_rate of the first learning rate.
    rounds : predictions that are timed.
    device, threads : of the trainings, as of `TrainSpec`.
    Raises SettingsError, and FactoryError where a file predicts otherwise than was reported.
    """
    settings = {name: value for name, value in locals().items() if name not in ("workspace", "fresh", "on_status")}
    check_values(settings, recovery_epochs="[1, inf)", recovery_rate="(0, inf)", rounds="[1, inf)")
    shares = {ORIGINAL: (ORIGINAL, 0.0)} | {one.strip(): _parse_method(one.strip()) for one in methods.split(",")}
    place = {"device": device, "threads": threads}
    trained = _open_trained(model, pick_device(TrainSpec(**place, precision="fp32")))
    rate = trained.training.lr * recovery_rate
    spec = replace(trained.training, **place, patience=0, epochs=recovery_epochs, lr=rate)
    rows, networks, outcomes = [], [], []
    for text, (name, share) in shares.items():
        row = _make_variant(workspace, trained, spec, text, name, share, fresh, on_status)
        networks.append(_load_variant(Path(row["file"]), trained.build))
        outcomes.append(trained.outcomes(networks[-1]))
        if abs(float(outcomes[-1].mean()) - row["quality"]) > TOLERANCE:
            raise FactoryError("A file predicts otherwise than was reported", where=row["file"],
                               got=float(outcomes[-1].mean()), wanted=row["quality"],
                               next_step="delete its run and compress again")  # fmt: skip
        on_status(f"{text}: {QUALITY} {row['quality']:.4f}, {row['bytes'] / 1e6:.2f} MB")
        rows.append(row)
    tokens_BT = torch.from_numpy(trained.data.rows["test"].parts[0][:1]).long()
    labels_CL = torch.from_numpy(trained.data.labels_CL).long()
    seconds = _measure_latencies(networks, lambda network: network.score_labels(tokens_BT, labels_CL), rounds)
    for row, one, found in zip(rows, seconds, outcomes, strict=True):
        row |= {"p50_ms": 1000 * one, "difference": float((found - outcomes[0]).mean())}
    costs = [(row["bytes"], row["p50_ms"], -row["quality"]) for row in rows]
    for row, own in zip(rows, costs, strict=True):
        better = (np.less_equal(other, own).all() and other != own for other in costs)
        row |= {"pareto": not any(better), "note": _note(row, rows[0])}
    made_of = settings | {"model": trained.fingerprint}
    folder = workspace.results / NAME / f"table-{fingerprint_json(made_of)[:12]}"
    facts = {"recipe": NAME, "quality": QUALITY, "rows": rows, "test_rows": len(outcomes[0]), "folder": str(folder),
             "settings": settings}  # fmt: skip
    table = pd.DataFrame(rows)[list(_COLUMNS)]
    files.write(folder / "table.tsv", table.to_csv(sep="\t", index=False, float_format="%.6f").encode())
    files.write_json(folder / "table.json", facts)
    figure = draw_compression(rows, QUALITY, "T5: compressed")
    files.replace(folder / "table.png", lambda target: figure.savefig(target, format="png", dpi=110))
    workspace.push()
    return facts


def _make_variant(
    workspace: Workspace, trained: _Trained, spec: TrainSpec, text: str, name: str, share: float, fresh: bool,
    say: Status,
) -> dict[str, Any]:  # fmt: skip
    """Change the network, train it on, store it, and return what its file predicts; stored facts where it is finished.

    spec : of the training after pruning.
    text : the method as it is written.
    """
    identity = {"trained": trained.fingerprint, "method": text, "training": spec.identity()}
    with open_recipe_run(
        workspace, NAME, identity, {"method": text}, trained.device, fresh=fresh, mirror="off", say=lambda line: None
    ) as run:
        if run.done is not None:
            return run.done
        say(f"{text}: {run.folder}")
        network, sizes, fit = trained.build({}), dict[str, int](), None
        network.load_state_dict(trained.network.state_dict())
        if name == "structured":
            sizes, state = prune_t5_state(trained.network.model, share)
            network = trained.build(sizes)
            network.model.load_state_dict(state)
        pruned = _linear_maps(network) if name == "magnitude" else []
        if pruned:  # in training the smallest of all weights stay zero; `prune.remove` makes it final
            pairs = [(module, "weight") for module in pruned]
            prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=share)
        if share:
            validation = Validation(lambda: trained.data.loss(network, "validation", trained.device, spec.eval_batch))
            fit = run.train(network, trained.data.rows["train"], label_loss, spec, validation,
                            settings={"method": text}, data=trained.fingerprint)  # fmt: skip
        for module in pruned:
            prune.remove(module, "weight")
        numbers, path = [one.detach() for one in network.parameters()], run.folder / FILE
        count = sum(one.numel() for one in numbers)
        _save_variant(path, network, sizes, name)
        outcomes_N = trained.outcomes(_load_variant(path, trained.build))  # what is reported is what the file predicts
        low, high = share_interval(round(outcomes_N.sum()), len(outcomes_N))
        facts = {
            "recipe": NAME, "method": text, "file": str(path), "bytes": path.stat().st_size, "parameters": count,
            "zeros": sum(int((one == 0).sum()) for one in numbers) / count, "quality": float(outcomes_N.mean()),
            "low": low, "high": high,
        }  # fmt: skip
        return run.finish(facts, fit, ("quality", "bytes"))


# ---------------------------------------------------------------------- methods


def _linear_maps(network: nn.Module) -> list[nn.Module]:
    """Return the linear maps; an output that is tied to the embedding is left alone."""
    tied = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    return [module for module in network.modules() if isinstance(module, nn.Linear) and id(module.weight) not in tied]


def prune_t5_state(model: Any, share: float) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return sizes and weights of a T5 without this share of its heads and inner units, the least important of each.

    A head counts as the norms of what it reads and writes. Layers of a stack share their table of relative positions,
    which has a column a head: their self-attention loses the same heads.
    """
    state, config, width = model.state_dict(), model.config, model.config.d_kv
    keep_heads, keep_inner = (max(round(size * (1 - share)), 1) for size in (config.num_heads, config.d_ff))
    kept = {name: value.clone() for name, value in state.items()}
    groups: dict[tuple[str, str], list[str]] = {}
    for name in state:
        if name.endswith("Attention.o.weight"):
            layer = name.removesuffix("o.weight")
            # Attention to the encoder's text has no such table: each layer chooses for itself.
            groups.setdefault((name.partition(".block.")[0], layer if "EncDec" in layer else ""), []).append(layer)
    for layers in groups.values():
        read = [state[f"{layer}v.weight"].unflatten(0, (-1, width)).flatten(1).norm(dim=1) for layer in layers]
        written = [state[f"{layer}o.weight"].unflatten(1, (-1, width)).norm(dim=(0, 2)) for layer in layers]
        chosen = _largest(sum(one * other for one, other in zip(read, written, strict=True)), keep_heads)
        rows = (chosen[:, None] * width + torch.arange(width)).flatten()
        for layer in layers:
            for own in "qkv":
                kept[f"{layer}{own}.weight"] = state[f"{layer}{own}.weight"][rows]
            kept[f"{layer}o.weight"] = state[f"{layer}o.weight"][:, rows]
            table = f"{layer}relative_attention_bias.weight"
            if table in state:
                kept[table] = state[table][:, chosen]
    for name in state:
        if name.endswith("wo.weight"):
            layer, scores = name.removesuffix("wo.weight"), state[name].norm(dim=0)
            readers = [f"{layer}{one}.weight" for one in ("wi", "wi_0", "wi_1") if f"{layer}{one}.weight" in state]
            for one in readers:
                scores = scores * state[one].norm(dim=1)
            chosen = _largest(scores, keep_inner)
            kept[name] = state[name][:, chosen]
            kept |= {one: state[one][chosen] for one in readers}
    return {"num_heads": keep_heads, "d_ff": keep_inner}, kept


def _largest(importance: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest, ascending."""
    return importance.topk(count).indices.sort().values


# ---------------------------------------------------------------------- the file of a variant


def _save_variant(path: Path, network: nn.Module, sizes: Mapping[str, int], method: str) -> None:
    """Write the weights of a variant, each once; with an int8 method the larger ones as int8 and a scale a row.

    sizes : other ones than the trained network has.
    """
    stored = {}
    for name, weight in network.named_parameters():
        value = weight.detach().cpu()
        if method in INT8 and value.ndim > 1 and value.numel() >= _SMALL:
            scale_O = value.flatten(1).abs().amax(1).clamp_min(1e-12) / 127
            stored[f"{name}#rows"] = scale_O
            stored[f"{name}#int8"] = (value / scale_O[:, None]).round().clamp(-127, 127).to(torch.int8)
        else:
            stored[name] = value.clone()
    write_state_file(path, {"method": method, "sizes": dict(sizes), "weights": stored})


def _load_variant(path: Path, build: Callable[[Mapping[str, int]], nn.Module]) -> nn.Module:
    """Read a variant into the network that `build` makes of its sizes; int8 is computed by torchao.

    Raises CheckpointError for a damaged file.
    """
    state = read_state_file(path)
    network, stored = build(state["sizes"]).eval(), state["weights"]
    names = dict(network.named_parameters())
    weights = {
        name: stored[name] if name in stored else stored[f"{name}#int8"].float() * stored[f"{name}#rows"][:, None]
        for name in names
    }
    network.load_state_dict(weights, strict=False)  # a tied weight stands there once
    if state["method"] in INT8:
        chosen = set(map(id, _linear_maps(network)))
        config = getattr(quantization, INT8[state["method"]])()
        quantization.quantize_(network, config, lambda module, name: id(module) in chosen)
    return network


# ---------------------------------------------------------------------- the table


@torch.no_grad()
def _measure_latencies(networks: Sequence[Any], predict: Callable[[Any], object], rounds: int) -> list[float]:
    """Return the median seconds of one prediction of each network, on one thread of the CPU; they take turns."""
    timers = [Timer("predict(network)", globals={"predict": predict, "network": one.cpu().eval()}) for one in networks]
    return np.median([[timer.timeit(1).median for timer in timers] for _ in range(rounds)], 0).tolist()


def _note(row: Mapping[str, Any], original: Mapping[str, Any]) -> str:
    """Return what a reader must know of a row."""
    by_magnitude = row["method"].startswith("magnitude")
    notes = {
        f"{row['zeros']:.0%} zeros, stored and multiplied like other numbers: sparse without speed": by_magnitude,
        "not faster here": not by_magnitude and original["p50_ms"] / row["p50_ms"] < 1.05,
        "not smaller": not by_magnitude and row["bytes"] >= original["bytes"],
        "clearly worse": row["high"] < original["low"],
    }
    return "; ".join(note for note, holds in notes.items() if holds and row is not original)


def summary(facts: Mapping[str, Any]) -> str:
    """Return the table as text."""
    lines = [f"T5, {facts['test_rows']:,} test rows; * on the Pareto front of size, latency, {facts['quality']}",
             f"  {'method':28} {'MB':>8} {'p50 ms':>8} {'quality (95 %)':>26}"]  # fmt: skip
    for row in facts["rows"]:
        quality = f"{row['quality']:.4f} ({row['low']:.4f} to {row['high']:.4f})"
        lines.append(f"{'*' if row['pareto'] else ' '} {row['method']:28} {row['bytes'] / 1e6:8.3f}"
                     f" {row['p50_ms']:8.2f} {quality:>26}  {row['note']}")  # fmt: skip
    return "\n".join([*lines, f"table: {facts['folder']}"])
