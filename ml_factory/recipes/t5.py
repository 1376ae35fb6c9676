"""recipe t5: a T5 that gives a text its label: read labelled texts, train its tokenizer and it, evaluate, write.

B rows of a batch, T tokens of a text, C labels, L tokens of a label, V tokens of the vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ml_factory.argument_checks import check_values
from ml_factory.errors import SettingsError
from ml_factory.evaluation.recipe_plots import draw_class_results, draw_labelled_rows
from ml_factory.lazy_module import LazyModule
from ml_factory.recipes.labelled_text import (
    PARTS,
    baseline_accuracies,
    check_parts,
    describe,
    made_up_texts,
    overview,
    read_labelled_texts,
    split_by_blocks,
    unseen_rows,
)
from ml_factory.recipes.language_models import BUILTIN, hub_errors, tokenizer_fingerprint, write_pretrained
from ml_factory.recipes.run import Status, is_writing_process, open_recipe_run
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace
from ml_factory.training.batches import BatchLoader, evaluate_mean_loss, evaluate_network_outputs
from ml_factory.training.device import Device, drawn_from, pick_device
from ml_factory.training.loop import Validation
from ml_factory.training.spec import TrainSpec

transformers, tokenizers = LazyModule("transformers"), LazyModule("tokenizers")
metrics, stats = LazyModule("sklearn.metrics"), LazyModule("scipy.stats")

NAME, STEP = "t5", 8  # the length of rows is a multiple of STEP
PAD, END = 0, 1
_SPECIALS = ["<pad>", "</s>", "<unk>"]  # ids 0, 1, 2
_PUBLISHED = {"d_kv": 64, "vocab_size": 32128}
# Sizes that are known without a file: of the built-in networks, and of those that Google published.
SIZES: dict[str, dict[str, int]] = {
    f"{BUILTIN}tiny": {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16},
    f"{BUILTIN}small": {"d_model": 128, "d_ff": 256, "num_layers": 3, "num_heads": 4, "d_kv": 32},
    "t5-small": {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8, **_PUBLISHED},
    "t5-base": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, **_PUBLISHED},
    "t5-large": {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, **_PUBLISHED},
}


# ---------------------------------------------------------------------- the network


class T5Network(nn.Module):
    """A T5 of transformers that returns its logits alone. model : T5ForConditionalGeneration."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, labels_BL: Tensor) -> Tensor:
        """Return logits (B, L, V) of each label's token, given the text and the label's earlier tokens."""
        mask_BT = (tokens_BT != PAD).long()
        return self._decoded(labels_BL, mask_BT, input_ids=tokens_BT)

    @torch.no_grad()
    def score_labels(self, tokens_BT: Tensor, labels_CL: Tensor) -> Tensor:
        """Return the log probability of each label's text, (B, C), in shapes that a compiler builds once."""
        mask_BT = (tokens_BT != PAD).long()
        encoded = self.model.encoder(input_ids=tokens_BT, attention_mask=mask_BT).last_hidden_state
        scores = []
        for labels_L in labels_CL:
            labels_BL = labels_L.expand(len(tokens_BT), -1)
            logits_BLV = self._decoded(labels_BL, mask_BT, encoder_outputs=(encoded,)).float()
            scores.append(-_nats(logits_BLV, labels_BL))
        return torch.stack(scores, 1)

    def _decoded(self, labels_BL: Tensor, mask_BT: Tensor, **text: Any) -> Tensor:
        earlier_BL = F.pad(labels_BL[:, :-1], (1, 0), value=PAD)  # T5 begins a text with padding
        return self.model(**text, attention_mask=mask_BT, decoder_input_ids=earlier_BL, use_cache=False).logits


def _nats(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """Return the nats of each label's text, (B,)."""
    return (F.cross_entropy(logits_BLV.transpose(1, 2), labels_BL, reduction="none") * (labels_BL != PAD)).sum(1)


def label_loss(network: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
    """Return (sum of w * nats of a label's text, sum of w) of (tokens_BT, labels_BL, weight_B)."""
    tokens_BT, labels_BL, weight_B = batch
    nats_B = _nats(network(tokens_BT.long(), labels_BL.long()).float(), labels_BL.long())
    return (nats_B * weight_B).sum(), weight_B.sum()


def t5_config(name: str, vocabulary: int) -> Any:
    """Return the configuration of a T5: builtin:tiny or small, t5-small to t5-large, a folder or a name at the hub.

    vocabulary : number of tokens of a network that begins from scratch.
    """
    known = SIZES.get(name.removeprefix("google-t5/"))
    if known is not None:
        return transformers.T5Config(**known | {"vocab_size": vocabulary}, decoder_start_token_id=PAD)
    with hub_errors("The model", name):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.model_type != "t5":
        raise SettingsError("This is no T5", where="model", got=f"{name}, a {config.model_type}", wanted="a T5")
    config.vocab_size = vocabulary
    return config


def new_t5(config: Any, seed: int) -> T5Network:
    """Return a T5 whose weights depend on the seed alone."""
    with drawn_from(seed, NAME):
        return T5Network(transformers.T5ForConditionalGeneration(config))


def load_t5(name: str) -> T5Network:
    """Return a trained T5 from a folder or the hub, safetensors only."""
    with hub_errors("The model", name):
        return T5Network(transformers.T5ForConditionalGeneration.from_pretrained(
            name, use_safetensors=True, dtype=torch.float32))  # fmt: skip


def train_tokenizer(texts: Sequence[str], vocabulary: int, positions: int) -> Any:
    """Return a tokenizer of transformers with at most so many pieces, a function of the texts alone.

    The pieces are those of byte-pair encoding, whose trainer is deterministic; that of tokenizers for unigrams is not.
    """
    pad, end, unknown = _SPECIALS
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=unknown))
    made.normalizer = tokenizers.normalizers.NFKC()
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=_SPECIALS, show_progress=False))  # fmt: skip
    made.post_processor = tokenizers.processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, eos_token=end, unk_token=unknown, model_max_length=positions
    )


# ---------------------------------------------------------------------- the data


@dataclass(frozen=True)
class T5Data:
    """Rows as the network reads them.

    labels, labels_CL : texts, and their tokens, ended by END and padded, int32.
    length : tokens of a row, padded. fingerprint : of rows, tokens, labels.
    """

    parts: Mapping[str, pd.DataFrame]
    rows: Mapping[str, BatchLoader]
    labels: tuple[str, ...]
    labels_CL: np.ndarray
    tokenizer: Any
    length: int
    fingerprint: str

    def loss(self, network: nn.Module, part: str, device: Device, size: int) -> float:
        """Return the mean nats of a label's text over a part's rows."""
        return evaluate_mean_loss(network, self.rows[part], label_loss, device, size)

    def predict(self, network: nn.Module, device: Device, size: int) -> tuple[list[str], np.ndarray]:
        """Return the likeliest label of each test row, and its log probability."""
        labels_CL = device.to_device(torch.from_numpy(self.labels_CL).long())

        def forward(network: nn.Module, batch: tuple) -> Tensor:
            return network.score_labels(batch[0].long(), labels_CL)

        scores_NC = evaluate_network_outputs(network, self.rows["test"], device, size, forward).numpy()
        return [self.labels[at] for at in scores_NC.argmax(1)], scores_NC.max(1)


def is_new(model: str, from_scratch: bool) -> bool:
    """Return True where the weights are random at first."""
    return from_scratch or model.startswith(BUILTIN)


def prepare_texts(
    device: Device, seed: int, *, model: str, from_scratch: bool, vocabulary: int, max_length: int, **sources: Any
) -> T5Data:
    """Read the texts as tokens, all rows of one length; a new tokenizer is trained from the training rows alone.

    The other arguments are those of `run_t5`. Raises SettingsError, FileError.
    """
    parts = _read_parts(seed, **sources)
    labels = check_parts(parts)
    if is_new(model, from_scratch):
        tokenizer = train_tokenizer([*parts["train"]["Text"], *labels], vocabulary, max_length)
    else:
        with hub_errors("The tokenizer", model):
            tokenizer = transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    padded = {"padding": True, "return_tensors": "np", "verbose": False}
    labels_CL = tokenizer(list(labels), **padded)["input_ids"].astype(np.int32)
    if len(np.unique(labels_CL, axis=0)) < len(labels):
        raise SettingsError("Two labels are the same to the tokenizer", where="Label", got=", ".join(labels)[:100],
                            next_step="name them in letters that the training texts have")  # fmt: skip
    texts = [text for part in parts.values() for text in part["Text"]]
    tokens_NT = tokenizer(
        texts, truncation=True, max_length=max_length, pad_to_multiple_of=STEP, **padded
    )["input_ids"].astype(np.int32)  # fmt: skip
    ends = np.cumsum([len(part) for part in parts.values()])[:-1]
    number = {label: at for at, label in enumerate(labels)}
    rows = {
        name: BatchLoader(device, [
            own_NT, labels_CL[part["Label"].map(number)], np.ones(len(part), np.float32)
        ])
        for (name, part), own_NT in zip(parts.items(), np.split(tokens_NT, ends), strict=True)
    }  # fmt: skip
    made_of = [{name: part.to_dict("list") for name, part in parts.items()}, tokenizer_fingerprint(tokenizer)]
    return T5Data(parts, rows, labels, labels_CL, tokenizer, tokens_NT.shape[1], fingerprint_json(made_of)[:16])


def _read_parts(
    seed: int, *, data: str, made_up: int, validation_share: float, test_share: float, **apart: str
) -> dict[str, pd.DataFrame]:
    """Return train, validation and test. apart : the file of each, "" for none."""
    sources = {"data": data, **apart, "fake_data": made_up}
    given = {f"--{name}" for name, value in sources.items() if value}
    if given in ({"--data"}, {"--fake_data"}):
        rows = made_up_texts(made_up, seed) if made_up else read_labelled_texts(data)
        return split_by_blocks(rows, validation_share, test_share)
    if given != {f"--{name}" for name in PARTS}:
        raise SettingsError(
            "Which texts?", where="--data", got=", ".join(sorted(given)) or "none",
            wanted="--data FILE.tsv, or --train, --validation and --test; columns Id, Text, Label",
            next_step="give the files, or try it with --fake_data",
        )  # fmt: skip
    return {name: read_labelled_texts(apart[name]) for name in PARTS}


# ---------------------------------------------------------------------- the run


def run_t5(
    workspace: Workspace, training: TrainSpec, *, data: str = "", train: str = "", validation: str = "",
    test: str = "", validation_share: float = 0.1, test_share: float = 0.1, made_up: int = 0,
    model: str = f"{BUILTIN}tiny", from_scratch: bool = False, vocabulary: int = 2000, max_length: int = 128,
    fresh: bool = False, on_status: Status = print,
) -> dict[str, Any]:  # fmt: skip
    """Train, resume or load the finished run of these settings; return its result, as stored in result.json.

    training : settings of the loop.
    data : file that is split by blocks. validation_share, test_share : of its rows.
    train, validation, test : files that are given apart.
    made_up : number of made-up texts in their place, 0 for none.
    model : builtin:tiny or small, t5-small to t5-large, a folder, a name at the hub.
    from_scratch : random first weights, and a tokenizer trained from the training rows; always so for builtin.
    vocabulary : pieces of that tokenizer, at most.
    max_length : tokens of a text at most; longer ones are cut.
    Raises SettingsError, FileError, CheckpointError.
    """
    given = {name: value for name, value in locals().items()
             if name not in ("workspace", "training", "fresh", "on_status")}  # fmt: skip
    check_values(
        given, validation_share="(0, 0.5)", test_share="(0, 0.5)", vocabulary="[8, inf)", max_length="[2, inf)",
        made_up="[0, inf)",
    )  # fmt: skip
    settings, say = given | {"training": asdict(training)}, on_status if is_writing_process() else (lambda line: None)
    spec, device = training, pick_device(training)
    texts = prepare_texts(device, spec.seed, **given)
    described = {name: given[name] for name in ("model", "from_scratch", "vocabulary", "max_length")}
    identity = {"model": described, "training": spec.identity(), "data": texts.fingerprint}
    with open_recipe_run(
        workspace, NAME, identity, settings, device, fresh=fresh, libraries=("transformers", "tokenizers"),
        mirror="off", say=say,
    ) as run:  # fmt: skip
        if run.done is not None:
            return run.done
        found = overview(texts.parts)
        say(f"{describe(found)}\nrows of {texts.length} tokens; {len(texts.tokenizer):,} pieces")
        network = (new_t5(t5_config(model, len(texts.tokenizer)), spec.seed) if is_new(model, from_scratch)
                   else load_t5(model))  # fmt: skip
        validation = Validation(lambda: texts.loss(network, "validation", device, spec.eval_batch))
        fit = run.train(
            network, texts.rows["train"], label_loss, spec, validation, settings=described, data=texts.fingerprint
        )
        predicted, scores = texts.predict(network, device, spec.eval_batch)
        if not run.writes:
            return {}
        rows, new = texts.parts["test"], unseen_rows(texts.parts, "test")
        truth, labels = rows["Label"].to_numpy(), np.array(predicted, object)
        facts = {
            "recipe": NAME, "run_id": run.run_id, "folder": str(run.folder), "settings": settings,
            "data": texts.fingerprint, "labels": list(texts.labels), "length": texts.length,
            "pieces": len(texts.tokenizer), "overview": found, **_class_scores(truth, labels),
            "unseen": _class_scores(truth[new], labels[new]) if new.any() else None,
            "baselines": baseline_accuracies(texts.parts["train"], rows), "stopped_early": fit.stopped_early,
            "compiles": fit.compiles,
        }  # fmt: skip
        write_pretrained(network.model, texts.tokenizer, run.folder / "model")
        _write_results(run.folder, facts | {"history": fit.history}, texts.parts, predicted, scores)
        run.finish(facts, fit, ("accuracy", "macro_f1"))
    return facts


def _class_scores(truth: Sequence[str], predicted: Sequence[str]) -> dict[str, Any]:
    """Return accuracy with its 95 % interval, and macro F1."""
    right = sum(one == other for one, other in zip(truth, predicted, strict=True))
    return {"accuracy": right / len(truth), "interval": share_interval(right, len(truth)), "rows": len(truth),
            "macro_f1": float(metrics.f1_score(truth, predicted, average="macro", zero_division=0))}  # fmt: skip


def share_interval(right: int, rows: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927), for rows that are independent."""
    found = stats.binomtest(right, rows).proportion_ci(0.95, method="wilson")
    return float(found.low), float(found.high)


def _write_results(
    folder: Path, facts: Mapping[str, Any], parts: Mapping[str, pd.DataFrame], predicted: list[str], scores: np.ndarray
) -> None:
    """Write predictions.tsv, results.tsv, overview.png and results.png."""
    test, baselines = parts["test"], facts["baselines"]
    rows = test[["Id", "Label"]].assign(Predicted=predicted, LogProbability=np.round(scores, 6))
    own = (NAME, facts["rows"], facts["accuracy"], *facts["interval"], facts["macro_f1"])
    others = [(name, facts["rows"], share, None, None, None) for name, share in baselines.items()]
    table = pd.DataFrame([own, *others], columns=["Model", "Rows", "Accuracy", "Low", "High", "MacroF1"])
    for name, frame in (("predictions.tsv", rows), ("results.tsv", table.round(6))):
        files.write(folder / name, frame.to_csv(sep="\t", index=False).encode())
    lengths = {
        name: {str(label): one.str.len().tolist() for label, one in part.groupby("Label")["Text"]}
        for name, part in parts.items()
    }
    bars = {"T5": facts["accuracy"], **baselines}
    for name, figure in (
        ("overview.png", draw_labelled_rows(lengths, "Texts by label", "characters of a text")),
        ("results.png", draw_class_results(facts["history"], test["Label"], predicted, bars, "T5 on the test rows")),
    ):
        files.replace(folder / name, lambda target, figure=figure: figure.savefig(target, format="png", dpi=110))


def summary(facts: Mapping[str, Any]) -> str:
    """Return the result in a few lines."""
    baselines, (low, high) = facts["baselines"], facts["interval"]
    best = max(baselines, key=baselines.get)
    lines = [
        f"accuracy {facts['accuracy']:.2%} ({low:.2%} to {high:.2%}), macro F1 {facts['macro_f1']:.4f} of "
        f"{facts['rows']:,} test rows",
        "baselines: " + ", ".join(f"{name} {value:.2%}" for name, value in baselines.items()),
    ]
    if baselines[best] >= low:
        lines.append(f"NOT clearly better than {best}, which costs next to nothing")
    return "\n".join([*lines, f"results: {facts['folder']}"])
