"""recipe t5: read labelled texts, train on the project's loop, evaluate, write the results."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ml_factory.errors import SettingsError
from ml_factory.evaluation.class_plots import draw_class_results, draw_labelled_rows
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import ModelFitResult, merge_inexact_reasons
from ml_factory.recipes.language.causal_lm import BUILTIN, hub_errors
from ml_factory.recipes.language.labelled_text import (
    PARTS,
    LabelledTexts,
    check_parts,
    describe,
    made_up_texts,
    overview,
    read_labelled_texts,
    split_by_blocks,
    unseen_rows,
)
from ml_factory.recipes.language.text_baselines import baseline_accuracies
from ml_factory.recipes.language.trained_tokenizer import train_tokenizer
from ml_factory.recipes.recipe_run import agree_on_run, is_writing_process, open_run_of_process, write_folder
from ml_factory.recipes.t5 import (
    PAD,
    LabelTexts,
    T5Network,
    label_loss,
    load_t5,
    mean_label_loss,
    new_t5,
    predict_labels,
    save_t5,
    score_labels,
    t5_config,
)
from ml_factory.runs import RunFolder
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace
from ml_factory.training.batches import BatchLoader
from ml_factory.training.device import Device, deterministic_device, pick_device
from ml_factory.training.loop import Validation, run_training_loop
from ml_factory.training.spec import TrainSpec

transformers = LazyModule("transformers")

NAME = "t5"
STEP = 8  # the length of rows is a multiple of it
Status = Callable[[str], object]


@dataclass(frozen=True)
class TextFiles:
    """Files of labelled texts: one that is split by blocks, or three; or made-up texts.

    data : file that is split. validation_share, test_share : of its rows.
    train, validation, test : files that are given apart.
    made_up : number of made-up texts in their place, 0 for none.
    """

    data: str = ""
    train: str = ""
    validation: str = ""
    test: str = ""
    validation_share: float = 0.1
    test_share: float = 0.1
    made_up: int = 0

    def __post_init__(self) -> None:
        for name in ("validation_share", "test_share"):
            if not 0 < getattr(self, name) < 0.5:
                raise SettingsError("Cannot split by this share", where=name, got=getattr(self, name),
                                    wanted="between 0 and 0.5")  # fmt: skip


@dataclass(frozen=True)
class T5ModelSettings:
    """The network and how it reads and writes.

    name : builtin:tiny or small, t5-small to t5-large, a folder, a name at the hub.
    from_scratch : random first weights, and a tokenizer trained from the training rows; always so for builtin.
    vocabulary : pieces of that tokenizer, at most.
    max_length : tokens of a text at most; longer ones are cut.
    """

    name: str = f"{BUILTIN}tiny"
    from_scratch: bool = False
    vocabulary: int = 2000
    max_length: int = 128

    def __post_init__(self) -> None:
        least = {"vocabulary": 8, "max_length": 2}
        for name, low in least.items():
            if type(getattr(self, name)) is not int or getattr(self, name) < low:
                raise SettingsError("Cannot train with this", where=name, got=getattr(self, name), wanted=f">= {low}")

    @property
    def is_new(self) -> bool:
        """True where the weights are random at first."""
        return self.from_scratch or self.name.startswith(BUILTIN)


@dataclass(frozen=True)
class T5Settings:
    """All settings of a run."""

    files: TextFiles = field(default_factory=TextFiles)
    model: T5ModelSettings = field(default_factory=T5ModelSettings)
    training: TrainSpec = field(default_factory=TrainSpec)


@dataclass(frozen=True)
class T5Data:
    """Rows as the network reads them. length : tokens of a row, padded. fingerprint : of rows, tokens, labels."""

    parts: Mapping[str, LabelledTexts]
    rows: Mapping[str, BatchLoader]
    targets: LabelTexts
    tokenizer: Any
    length: int
    fingerprint: str


def run_t5(
    workspace: Workspace, settings: T5Settings, *, fresh: bool = False, on_status: Status = print, mirror: str = "off"
) -> dict[str, Any]:
    """Train, resume or load the finished run of these settings; return its result, as stored in result.json.

    Raises SettingsError, FileError, CheckpointError.
    """
    first = is_writing_process()
    say = on_status if first else (lambda line: None)
    device = pick_device(settings.training)
    parts = read_parts(settings.files, settings.training.seed)
    data = prepare_texts(settings, parts, device)
    identity = {"model": asdict(settings.model), "training": settings.training.identity(), "data": data.fingerprint}
    try:
        run, done = agree_on_run(workspace, NAME, identity, device.processes, fresh)
        if done is not None:
            say(f"finished before: {run.folder}")
            return done
        say(describe(overview(parts)))
        with deterministic_device(device):
            return _train(workspace, run, settings, data, device, mirror, say)
    finally:
        if first:
            workspace.push()


def read_parts(given: TextFiles, seed: int) -> dict[str, LabelledTexts]:
    """Return train, validation and test. Raises SettingsError, FileError."""
    apart = {name: getattr(given, name) for name in PARTS}
    if given.made_up:
        return split_by_blocks(made_up_texts(given.made_up, seed), given.validation_share, given.test_share)
    if given.data and not any(apart.values()):
        return split_by_blocks(read_labelled_texts(given.data), given.validation_share, given.test_share)
    if given.data or not all(apart.values()):
        found = ", ".join(f"--{name}" for name, value in apart.items() if value)
        raise SettingsError(
            "Which texts?", where="--data", got=found or "none",
            wanted="--data FILE.tsv, or --train, --validation and --test; columns Id, Text, Label",
            next_step="give the files, or try it with --fake_data",
        )  # fmt: skip
    return {name: read_labelled_texts(address) for name, address in apart.items()}


def prepare_texts(settings: T5Settings, parts: Mapping[str, LabelledTexts], device: Device) -> T5Data:
    """Return tokens, all rows of one length; a new tokenizer is trained from the training rows alone."""
    labels, model = check_parts(parts), settings.model
    if model.is_new:
        tokenizer = train_tokenizer([*parts["train"].texts, *labels], model.vocabulary, model.max_length)
    else:
        with hub_errors("The tokenizer", model.name):
            tokenizer = transformers.AutoTokenizer.from_pretrained(model.name, trust_remote_code=False)
    targets = LabelTexts.of(labels, tokenizer)
    tokens = {name: encode_texts(tokenizer, rows.texts, model.max_length) for name, rows in parts.items()}
    longest = max(len(row) for part in tokens.values() for row in part)
    length = min(-(-longest // STEP) * STEP, model.max_length)
    rows = {name: load_rows(device, tokens[name], targets.rows(part.labels), length) for name, part in parts.items()}
    made_of = [{name: part.fingerprint for name, part in parts.items()}, tokenizer.backend_tokenizer.to_str()]
    return T5Data(parts, rows, targets, tokenizer, length, fingerprint_json(made_of)[:16])


def load_rows(device: Device, tokens: list[np.ndarray], labels_NL: np.ndarray, length: int) -> BatchLoader:
    """Return a loader of (tokens, label, weight 1), the tokens padded to this length."""
    tokens_NT = np.full((len(tokens), length), PAD, np.int32)
    for place, row in enumerate(tokens):
        tokens_NT[place, : len(row)] = row
    return BatchLoader(device, [tokens_NT, labels_NL, np.ones(len(tokens), np.float32)])


def encode_texts(tokenizer: Any, texts: tuple[str, ...], most: int) -> list[np.ndarray]:
    """Return the tokens of each text, at most so many, the last one the end."""
    ids = tokenizer(list(texts), truncation=True, max_length=most, verbose=False)["input_ids"]
    return [np.asarray(row, np.int32) for row in ids]


def _train(
    workspace: Workspace, run: RunFolder, settings: T5Settings, data: T5Data, device: Device, mirror: str,
    say: Status,
) -> dict[str, Any]:  # fmt: skip
    """Train or resume, evaluate, and store result, pictures and model."""
    spec, model = settings.training, settings.model
    network = new_t5(t5_config(model.name, len(data.tokenizer)), spec.seed) if model.is_new else load_t5(model.name)
    identity = {"model": NAME, "settings": {**asdict(model), "loop": spec.identity()}, "data": data.fingerprint}
    say(f"rows of {data.length} tokens; {len(data.tokenizer):,} pieces")

    def validation_loss() -> float:
        return mean_label_loss(network, data.rows["validation"], device, spec.eval_batch)

    opening = open_run_of_process(
        workspace, NAME, run, asdict(settings), device.processes, libraries=("transformers", "tokenizers"),
        threads=device.threads, mirror=mirror,
    )  # fmt: skip
    with opening as (opened, checkpoints):
        result = run_training_loop(
            network, len(data.rows["train"]), data.rows["train"], label_loss, spec, device, identity=identity,
            validation=Validation(validation_loss), callbacks=opened.callbacks if opened else (),
            checkpoints=checkpoints,
        )  # fmt: skip
        predicted = evaluate_test_rows(network, settings, data, device)
        if opened is None:
            return {}
        facts = _result(data, result, predicted[0])
        facts["inexact"] = merge_inexact_reasons(result.nondeterminism, opened.checkpoints.machine_differences)
        facts |= {"run_id": run.run_id, "folder": str(run.folder), "settings": asdict(settings)}
        facts["data"] = data.fingerprint
        write_folder(run.folder / "model", lambda folder: save_t5(network, data.tokenizer, folder))
        write_results(run.folder, facts, data, predicted)
        opened.finish(facts, {"accuracy": facts["greedy"]["accuracy"], "macro_f1": facts["greedy"]["macro_f1"]})
    return facts


def evaluate_test_rows(
    network: T5Network, settings: T5Settings, data: T5Data, device: Device
) -> tuple[list[str], np.ndarray]:
    """Return the label written for each test row and its log probability."""
    length = data.targets.tokens_CL.shape[1]
    written, scores = predict_labels(network, data.rows["test"], device, settings.training.eval_batch, length)
    return data.targets.read(written, data.tokenizer), scores


def _result(data: T5Data, result: ModelFitResult, predicted: list[str]) -> dict[str, Any]:
    """Return the facts of the finished training."""
    test = data.parts["test"]
    unseen = unseen_rows(data.parts, "test")
    new = [(truth, label) for truth, label, is_new in zip(test.labels, predicted, unseen, strict=True)
           if is_new]  # fmt: skip
    return {
        "recipe": NAME, "greedy": score_labels(list(test.labels), predicted),
        "unseen": score_labels(*map(list, zip(*new, strict=True))) if new else None,
        "baselines": baseline_accuracies(data.parts["train"], test),
        "overview": overview(data.parts), "labels": list(data.targets.labels), "length": data.length,
        "pieces": len(data.tokenizer),
        "history": result.history,
        "best_epoch": result.best_epoch, "stopped_early": result.stopped_early, "exact": result.exact,
        "resumed_step": result.resumed_step, "machine": result.machine, "compiles": result.compiles,
    }  # fmt: skip


def write_results(
    folder: Path, facts: Mapping[str, Any], data: T5Data, predicted: tuple[list[str], np.ndarray]
) -> None:
    """Write predictions.tsv, results.tsv, overview.png and results.png."""
    test = data.parts["test"]
    lines = ["Id\tLabel\tGreedy\tGreedyLogProbability"]
    greedy = predicted[0]
    for row in zip(test.ids, test.labels, *predicted, strict=True):
        lines.append("\t".join(f"{one:.6f}" if isinstance(one, float) else " ".join(one.split()) for one in row))
    files.write(folder / "predictions.tsv", ("\n".join(lines) + "\n").encode())
    table = ["Search\tRows\tAccuracy\tLow\tHigh\tMacroF1"]
    score = facts["greedy"]
    values = (score["accuracy"], *score["interval"], score["macro_f1"])
    table.append("\t".join(["greedy", str(score["rows"]), *(f"{value:.6f}" for value in values)]))
    table += [f"{name}\t{len(test)}\t{value:.6f}\t\t\t" for name, value in facts["baselines"].items()]
    files.write(folder / "results.tsv", ("\n".join(table) + "\n").encode())
    lengths: dict[str, dict[str, list[int]]] = {}
    for name, rows in data.parts.items():
        for text, label in zip(rows.texts, rows.labels, strict=True):
            lengths.setdefault(name, {}).setdefault(label, []).append(len(text))
    bars = {"T5 (greedy)": facts["greedy"]["accuracy"], **facts["baselines"]}
    for name, figure in (
        ("overview.png", draw_labelled_rows(lengths, "Texts by label", "characters of a text")),
        ("results.png", draw_class_results(facts["history"], test.labels, greedy, bars, "T5 on the test rows")),
    ):
        files.replace(folder / name, lambda target, figure=figure: figure.savefig(target, format="png", dpi=110))


def summary(facts: Mapping[str, Any]) -> str:
    """Return the result in a few lines."""
    greedy = facts["greedy"]
    best = max(facts["baselines"], key=facts["baselines"].get)
    low, high = greedy["interval"]
    lines = [
        f"accuracy {greedy['accuracy']:.2%} ({low:.2%} to {high:.2%}), macro F1 {greedy['macro_f1']:.4f} of "
        f"{greedy['rows']:,} test rows",
        "baselines: " + ", ".join(f"{name} {value:.2%}" for name, value in facts["baselines"].items()),
    ]
    if facts["baselines"][best] >= low:
        lines.append(f"NOT clearly better than {best}, which costs next to nothing")
    return "\n".join([*lines, f"results: {facts['folder']}"])
