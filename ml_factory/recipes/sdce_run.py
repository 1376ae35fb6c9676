"""recipe sdce: load two language models and text, train on the project's loop, evaluate next to an n-gram model.

N rows, T tokens of a row.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ml_factory.argument_checks import check_settings, read_yaml
from ml_factory.errors import SettingsError, check_known
from ml_factory.process_identity import wants_bfloat16
from ml_factory.recipes.language_models import (
    DTYPES,
    LanguageModel,
    TextSource,
    load_causal_model,
    open_text,
    pack_tokens,
    write_pretrained,
)
from ml_factory.recipes.run import (
    Status,
    is_writing_process,
    open_recipe_run,
    root_of_output,
    weights_fingerprint,
)
from ml_factory.recipes.sdce import KINDS, SurrogateLoss, next_token_loss
from ml_factory.recipes.surrogate import SurrogateTopTokens, cache_top_tokens, join_vocabularies
from ml_factory.storage.files import local_cache_folder
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace
from ml_factory.training.batches import BatchLoader, evaluate_mean_loss
from ml_factory.training.device import Device, pick_device
from ml_factory.training.loop import Validation
from ml_factory.training.spec import TrainSpec

NAME = "sdce"
NGRAM_TOKENS = 4_000_000  # training tokens that the n-gram model counts, at most
DEVICES = {"auto": "auto", "cpu": "cpu", "cuda": "cuda", "tpu": "xla"}
PRECISIONS = {"auto": "auto", "no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


def _at(place: str, default: Any, *, machine: bool = False) -> Any:
    """Return a field. place : section and key in the YAML file; machine : another value makes no other run."""
    return field(default=default, metadata={"place": place, "machine": machine})


@dataclass(frozen=True)
class SdceSettings:
    """All settings of one training, named as the flags; each has a place in the sections of the YAML file.

    base_model, surrogate_model : builtin:tiny, small or medium; a folder; or a name at the Hugging Face hub.
    model_dtype : number format of the steps where mixed_precision is auto; weights in training stay float32.
    surrogate_dtype : of the surrogate's weights and its forward pass.
    surrogate_cache : none computes the surrogate's tokens in each step; float32 once, on disk.
    cache_dir : folder of the caches of tokens and of the surrogate; empty for the user's cache folder.
    dataset : a .txt, .jsonl or .parquet file, a folder of them, gs://bucket/file, or a data set of the hub.
    dataset_config, split : of the hub's data set.
    max_tokens : tokens that are read at most, 0 for all.
    validation_share : share of the sequences, the last ones, that are held out.
    batch_size : sequences a device and micro-batch.
    output_dir : folder or gs://bucket/prefix of checkpoints, log and model.
    """

    base_model: str = _at("model.name_or_path", "gpt2")
    model_dtype: str = _at("model.dtype", "float32")
    gradient_checkpointing: bool = _at("model.gradient_checkpointing", False, machine=True)
    init_from_scratch: bool = _at("model.init_from_scratch", False)
    surrogate_model: str = _at("surrogate.name_or_path", "Qwen/Qwen3-0.6B")
    surrogate_dtype: str = _at("surrogate.dtype", "bfloat16")
    surrogate_k: int = _at("surrogate.k", 30)
    probability_threshold: float = _at("surrogate.probability_threshold", 0.02)
    surrogate_loss_weight_initial: float = _at("surrogate.loss_weight_initial", 1.0)
    surrogate_loss_weight_final: float = _at("surrogate.loss_weight_final", 0.0)
    surrogate_cache: str = _at("surrogate.cache", "none")
    cache_dir: str = _at("surrogate.cache_dir", "", machine=True)
    dataset: str = _at("data.dataset_name", "wikitext")
    dataset_config: str = _at("data.dataset_config", "")
    split: str = _at("data.split", "train")
    text_column: str = _at("data.text_column", "text")
    max_seq_length: int = _at("data.max_seq_length", 1024)
    max_tokens: int = _at("data.max_tokens", 0)
    validation_share: float = _at("data.validation_share", 0.05)
    device: str = _at("training.device", "auto", machine=True)
    tpu_cores: int = _at("training.tpu_cores", 0, machine=True)
    tpu_num_hosts: int = _at("training.tpu_num_hosts", 1, machine=True)
    num_epochs: int = _at("training.num_epochs", 3)
    batch_size: int = _at("training.per_device_train_batch_size", 4, machine=True)  # the whole batch is of the run
    gradient_accumulation_steps: int = _at("training.gradient_accumulation_steps", 4, machine=True)
    learning_rate: float = _at("training.learning_rate", 1e-4)
    weight_decay: float = _at("training.weight_decay", 0.01)
    warmup_ratio: float = _at("training.warmup_ratio", 0.1)
    max_grad_norm: float = _at("training.max_grad_norm", 1.0)
    mixed_precision: str = _at("training.mixed_precision", "auto")
    loss_type: str = _at("training.loss_type", "surrogate")
    patience: int = _at("training.patience", 0)
    seed: int = _at("training.seed", 0)
    threads: int = _at("training.threads", 0, machine=True)
    log_steps: int = _at("training.log_steps", 50, machine=True)
    save_seconds: float = _at("training.save_seconds", 60.0, machine=True)
    output_dir: str = _at("training.output_dir", "./outputs", machine=True)
    wandb_project: str = _at("training.wandb_project", "", machine=True)

    def __post_init__(self) -> None:
        some, any_ = "[1, inf)", "[0, inf)"
        check_settings(
            self, model_dtype=tuple(DTYPES), surrogate_dtype=tuple(DTYPES), surrogate_cache=("none", "float32"),
            device=tuple(DEVICES), mixed_precision=tuple(PRECISIONS), loss_type=KINDS, surrogate_k=some,
            tpu_num_hosts=some, batch_size=some, gradient_accumulation_steps=some, max_tokens=any_,
            tpu_cores=any_, surrogate_loss_weight_initial=any_, surrogate_loss_weight_final=any_, seed=any_,
            max_seq_length="[2, inf)", probability_threshold="[0, 1)", validation_share="(0, 1)",
        )  # fmt: skip
        halves = self.precision == "fp16" or (self.needs_surrogate and self.surrogate_dtype == "float16")
        if self.device == "tpu" and halves:
            raise SettingsError("A TPU has no fp16", where="mixed_precision", got="fp16", wanted="bf16 or no",
                                next_step="--mixed_precision bf16; dtype bfloat16 of both models")  # fmt: skip

    @property
    def needs_surrogate(self) -> bool:
        """False for the standard loss."""
        return self.loss_type != "standard"

    @property
    def precision(self) -> str:
        """Precision of the steps, as of `TrainSpec`."""
        named = PRECISIONS[self.mixed_precision]
        return {"bfloat16": "bf16", "float16": "fp16"}.get(self.model_dtype, "auto") if named == "auto" else named

    def identity(self) -> dict[str, Any]:
        """Return what makes another run when it changes: all but the machine's own settings."""
        return {
            item.metadata["place"]: getattr(self, item.name) for item in fields(self) if not item.metadata["machine"]
            and (self.needs_surrogate or not item.metadata["place"].startswith("surrogate."))
        }  # fmt: skip


def sdce_settings(config: Path | None = None, flags: Mapping[str, Any] | None = None) -> SdceSettings:
    """Return the defaults, overridden by the YAML file, overridden by the flags that are given (not None).

    XLA_USE_BF16=1 in the environment stands for mixed_precision bf16 where neither names a precision.

    flags : by name, with underscores; `standard_training` stands for loss_type standard.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    if given.pop("standard_training", False):
        if given.get("loss_type", "standard") != "standard":
            raise SettingsError("Two losses at once", where="standard_training", got=f"loss_type {given['loss_type']}",
                                next_step="leave one of the two flags out")  # fmt: skip
        given["loss_type"] = "standard"
    values = ({} if config is None else _read_yaml(config)) | given
    if values.get("mixed_precision", "auto") == "auto" and wants_bfloat16():
        values["mixed_precision"] = "bf16"
    return SdceSettings(**values)


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return the values in the sections of a YAML file, by name of the setting. Raises SettingsError."""
    wanted = "YAML with sections model, surrogate, data, training"
    table = read_yaml(path, wanted)
    for section, values in table.items():
        if not isinstance(values, dict | None):
            raise SettingsError("These settings cannot be read", where=path, got=f"{section}: {values}", wanted=wanted)
    given = {f"{section}.{key}": value for section, values in table.items() for key, value in (values or {}).items()}
    known = {item.metadata["place"]: item for item in fields(SdceSettings)}
    for place in given:
        check_known("There is no such setting", path, place, known)
    return {known[place].name: _number(value, known[place].type) for place, value in given.items()}


def _number(value: Any, kind: object) -> Any:
    """Return a number that YAML reads as a text, such as 1e-4, as a number where one is wanted."""
    try:
        return float(value) if kind is float and isinstance(value, str) else value
    except ValueError:
        return value


def run_sdce(
    config: Path | None = None, *, fresh: bool = False, mirror: str = "auto", on_status: Status = print, **flags: Any
) -> dict[str, Any]:
    """Train, resume or load the finished run of these settings; return its result, as stored in result.json.

    With torchrun or on a TPU slice every process calls this; the first one writes.

    config : YAML with sections model, surrogate, data, training.
    flags : settings by name, which win, as of `sdce_settings`.
    """
    settings = sdce_settings(config, flags)
    say = on_status if is_writing_process() else (lambda line: None)
    spec, device = _training_spec(settings)
    say(batch_arithmetic(settings, device.batch_share_count, on_tpu=device.kind == "xla"))
    text = open_text(settings.dataset, settings.dataset_config, settings.split, settings.text_column)
    identity = settings.identity() | {"batch": spec.batch, "text": text.fingerprint}
    with open_recipe_run(
        Workspace(root_of_output(settings.output_dir)), NAME, identity, asdict(settings), device, fresh=fresh,
        libraries=("transformers",), mirror=mirror, project=settings.wandb_project, say=say,
    ) as run:  # fmt: skip
        if run.done is not None:
            return run.done
        length = settings.max_seq_length
        base = load_causal_model(
            settings.base_model, length, seed=spec.seed, from_scratch=settings.init_from_scratch
        ).check(length)
        train, held_out, fingerprint = _packed_text(settings, text, base, say)
        online, cached, surrogate = (
            _surrogate_tokens(settings, base, train, fingerprint, device, say)
            if settings.needs_surrogate else (None, (), {})
        )  # fmt: skip
        feed, held_feed = (
            BatchLoader(device, [*rows, np.ones(len(rows[0]), np.float32)]) for rows in ([train, *cached], [held_out])
        )
        loss = SurrogateLoss(
            settings.loss_type, settings.surrogate_loss_weight_initial, settings.surrogate_loss_weight_final,
            threshold=settings.probability_threshold, top_tokens=online,
        )  # fmt: skip

        def held_out_loss() -> float:
            return evaluate_mean_loss(base.network, held_feed, next_token_loss, device, spec.eval_batch)

        before = held_out_loss()
        data = {"tokens": fingerprint, "rows": len(train), "surrogate": surrogate.get("weights", "")}
        fit = run.train(
            base.network, feed, loss, spec, Validation(held_out_loss), settings=settings.identity(), data=data
        )
        after = held_out_loss()
        if not run.writes:
            return {}
        most = max(NGRAM_TOKENS // length, 1)
        losses = ngram_losses(train[:most], held_out[:most], base.vocabulary)
        least = int(np.argmin(losses))
        write_pretrained(base.network.model, base.tokenizer.inner, run.folder / "model")
        facts = {
            "loss_type": settings.loss_type, "loss": after, "perplexity": math.exp(min(after, 700.0)),
            "loss_before": before, "ngram_order": least + 1, "ngram_loss": losses[least],
            "ngram_perplexity": math.exp(losses[least]), "better_than_ngram": after < losses[least],
            "batch": spec.batch, "sequences": len(train), "held_out": len(held_out),
            "tokens_per_second": (fit.machine.get("rows_per_second") or 0.0) * length, "surrogate": surrogate,
            "run_id": run.run_id, "model": str(run.folder / "model"),
        }  # fmt: skip
        return run.finish(facts, fit, ("loss", "perplexity", "ngram_loss", "best_epoch"))


def summary(result: dict[str, Any]) -> str:
    """Return the result in a few lines."""
    verdict = "better than" if result["better_than_ngram"] else "NOT better than"
    return "\n".join([
        f"{result['loss_type']}: held-out loss {result['loss']:.4f} nats a token, perplexity "
        f"{result['perplexity']:.2f} (epoch {result['best_epoch']}; before training {result['loss_before']:.4f})",
        f"{verdict} {result['ngram_order']}-grams: {result['ngram_loss']:.4f}, perplexity "
        f"{result['ngram_perplexity']:.2f}",
        f"model: {result['model']}",
    ])  # fmt: skip


def _training_spec(given: SdceSettings) -> tuple[TrainSpec, Device]:
    """Return the settings of the loop, with the batch of all devices together, and the device."""
    count, hosts = os.environ.get("TPU_PROCESS_COUNT", "").strip(), given.tpu_num_hosts
    if count and hosts > 1 and count != str(hosts):
        raise SettingsError("Two numbers of hosts", where="tpu_num_hosts", got=hosts,
                            wanted=f"{count}, as TPU_PROCESS_COUNT has it")  # fmt: skip
    common = {"device": DEVICES[given.device], "precision": given.precision, "threads": given.threads}
    device, accumulate = pick_device(TrainSpec(**common)), given.gradient_accumulation_steps
    spec = TrainSpec(
        epochs=given.num_epochs, batch=given.batch_size * device.batch_share_count * accumulate,
        accumulate=accumulate, lr=given.learning_rate, weight_decay=given.weight_decay, warmup=given.warmup_ratio,
        patience=given.patience, clip=given.max_grad_norm, seed=given.seed, log_steps=given.log_steps,
        eval_batch=given.batch_size * device.chips, save_seconds=given.save_seconds,
        recompute=given.gradient_checkpointing, **common,
    )  # fmt: skip
    return spec, device


def batch_arithmetic(given: SdceSettings, chips: int, *, on_tpu: bool) -> str:
    """Format how many sequences and tokens a step has. chips : devices that were found."""
    each, parts = given.batch_size, given.gradient_accumulation_steps
    total, named = each * chips * parts, given.tpu_cores * given.tpu_num_hosts
    line = (
        f"batch: {each} sequences a device x {chips} devices x {parts} accumulated = {total:,} sequences, "
        f"{total * given.max_seq_length:,} tokens a step"
    )
    if on_tpu and named and named != chips:
        line += (
            f" (--tpu_cores {given.tpu_cores} x --tpu_num_hosts {given.tpu_num_hosts} names {named}; this slice has "
            f"{chips} chips: the number in a v4's name counts cores, of which a chip has two)"
        )
    return line


def _packed_text(
    given: SdceSettings, source: TextSource, base: LanguageModel, say: Status
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the packed sequences of the text, the last share of them apart, and a hash of what they are."""
    made_of = [source.fingerprint, base.tokenizer.fingerprint, given.max_seq_length, given.max_tokens]
    fingerprint = fingerprint_json(made_of)[:16]
    folder = _cache_folder(given) / f"tokens-{fingerprint}"
    rows = pack_tokens(source, base.tokenizer, given.max_seq_length, folder, most=given.max_tokens)
    held_out = max(round(len(rows) * given.validation_share), 1)
    if len(rows) <= held_out:
        raise SettingsError("Too little text to hold some out", where="data", got=f"{len(rows)} sequences",
                            wanted="at least 2", next_step="more text, or a smaller max_seq_length")  # fmt: skip
    say(f"text: {len(rows):,} sequences of {given.max_seq_length} tokens, the last {held_out:,} held out")
    return rows[:-held_out], rows[-held_out:], fingerprint


def _cache_folder(given: SdceSettings) -> Path:
    return Path(given.cache_dir).expanduser() if given.cache_dir else local_cache_folder(NAME)


def _surrogate_tokens(
    given: SdceSettings, base: LanguageModel, rows: np.ndarray, fingerprint: str, device: Device, say: Status
) -> tuple[SurrogateTopTokens | None, tuple[np.ndarray, ...], dict[str, Any]]:
    """Check the surrogate on the host, join the vocabularies, and cache its tokens where the settings want it.

    Returns the function that computes its tokens, or their caches, and facts.
    """
    if device.kind == "xla" and given.surrogate_dtype == "float16":
        raise SettingsError("A TPU has no fp16", where="surrogate.dtype", got="float16", wanted="bfloat16 or float32")
    length, k = given.max_seq_length, given.surrogate_k
    model = load_causal_model(given.surrogate_model, length, seed=given.seed, dtype=given.surrogate_dtype).check(length)
    join = join_vocabularies(base.tokenizer, model.tokenizer, base.vocabulary, model.vocabulary)
    share = join.matched / join.size
    say(f"vocabulary: {join.matched:,} of {join.size:,} tokens ({share:.1%}) of {base.name} are in {model.name}")
    join.check(base.name, model.name)
    at_once = 1 if device.kind == "cpu" else 4  # sequences of one forward pass
    top_tokens = SurrogateTopTokens(model.network, join, k, model.tokenizer.end, device, at_once)
    facts = {
        "weights": weights_fingerprint(model.network.state_dict()), "vocabulary_share": share,
        "text_share": float((join.surrogate_of_base[rows[:1000].ravel()] >= 0).mean()),
        "positions_with_token": _share_with_token(top_tokens, rows, given.probability_threshold, say),
    }  # fmt: skip
    if given.surrogate_cache == "none":
        return top_tokens, (), facts
    made_of = [fingerprint, len(rows), facts["weights"], model.tokenizer.fingerprint, k, at_once, device.kind]
    folder = _cache_folder(given) / f"surrogate-{fingerprint_json(made_of)[:16]}"
    cached = cache_top_tokens(rows, top_tokens, folder)
    say(f"surrogate: {k} tokens a position cached in {folder}")
    return None, cached, facts


def _share_with_token(top_tokens: SurrogateTopTokens, rows: np.ndarray, threshold: float, say: Status) -> float:
    """Say and return the share of the positions of the first sequences that have a token above the threshold."""
    tokens_BT = torch.from_numpy(rows[: top_tokens.rows_at_once].astype(np.int64))
    ids_BTK, logprobs_BTK = (part.cpu() for part in top_tokens(top_tokens.device.to_device(tokens_BT)))
    share = float(((ids_BTK >= 0) & (logprobs_BTK.exp() >= threshold)).any(dim=-1).float().mean())
    line = (
        f"surrogate: {share:.1%} of {tokens_BT.numel():,} positions have a token of probability {threshold:g} or more"
    )
    say(line if share else f"{line}: the loss is the standard one. Next: a lower probability_threshold, or a surrogate "
                           "that knows this text")  # fmt: skip
    return share


def ngram_losses(train_NT: np.ndarray, held_out_NT: np.ndarray, vocabulary: int) -> list[float]:
    """Return the mean nats of tokens 1 .. T - 1 of held-out rows, as networks are scored, by 1-grams to 6-grams.

    The cheapest baseline, interpolated with Witten-Bell weights: P(w | h) = (count(h w) + kinds(h) P(w | h')) /
    (count(h) + kinds(h)), where kinds(h) is the number of different tokens seen after h, h' is h without its oldest
    token, and before any context each token has 1 / V. Contexts do not cross rows.
    """
    tokens_NT = np.concatenate([train_NT, held_out_NT]).astype(np.int64) + 1  # 0 stands before the row
    contexts_NT, chance = np.zeros_like(tokens_NT), np.full(held_out_NT.shape, 1.0 / vocabulary)
    rows, losses = len(train_NT), list[float]()
    for _ in range(6):
        _, grams = np.unique(contexts_NT * (vocabulary + 1) + tokens_NT, return_inverse=True)
        _, first = np.unique(grams[:rows], return_index=True)
        seen, context = np.bincount(grams[:rows].ravel(), minlength=grams.max() + 1), contexts_NT[:rows].ravel()
        total = np.bincount(context, minlength=contexts_NT.max() + 1)[contexts_NT[rows:]]
        kinds = np.bincount(context[first], minlength=contexts_NT.max() + 1)[contexts_NT[rows:]]
        mixed = (seen[grams[rows:]] + kinds * chance) / np.maximum(total + kinds, 1)
        chance = np.where(total > 0, mixed, chance)
        losses.append(float(-np.log(chance[:, 1:]).mean()))
        contexts_NT = np.pad(grams[:, :-1] + 1, ((0, 0), (1, 0)))  # a gram is the context of the next token
    return losses
