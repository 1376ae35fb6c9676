"""recipe sdce: load two language models and text, train on the project's loop, evaluate next to an n-gram model."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ml_factory.errors import SettingsError
from ml_factory.models.base import ModelFitResult, merge_inexact_reasons
from ml_factory.recipes.language.causal_lm import LanguageModel, load_causal_model
from ml_factory.recipes.language.ngram import NgramModel
from ml_factory.recipes.language.surrogate_top_tokens import SurrogateTopTokens, cache_top_tokens, weights_fingerprint
from ml_factory.recipes.language.text import open_text, pack_tokens
from ml_factory.recipes.language.vocabularies import VocabularyJoin, join_vocabularies
from ml_factory.recipes.recipe_run import (
    agree_on_run,
    check_number_of_hosts,
    is_writing_process,
    open_run_of_process,
    root_of_output,
    write_folder,
)
from ml_factory.recipes.sdce import SurrogateLoss, next_token_loss
from ml_factory.recipes.sdce_settings import DEVICES, SdceSettings
from ml_factory.runs import RunFolder
from ml_factory.storage.files import local_cache_folder
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace
from ml_factory.training.batches import BatchLoader
from ml_factory.training.device import Device, deterministic_device, pick_device
from ml_factory.training.evaluate import evaluate_mean_loss
from ml_factory.training.loop import Validation, run_training_loop
from ml_factory.training.spec import TrainSpec

NAME = "sdce"
ORDER = 6  # longest n-grams of the baseline
NGRAM_TOKENS = 4_000_000  # training tokens that the n-gram model counts, at most
IN_MEMORY = 1 << 30  # bytes of rows that are read into memory; more is read from disk batch by batch

Status = Callable[[str], object]


@dataclass(frozen=True)
class _Rows:
    """Sequences of the training and those held out, and a hash of what they are."""

    train: np.ndarray
    held_out: np.ndarray
    fingerprint: str


@dataclass(frozen=True)
class _Surrogate:
    """The surrogate's tokens: a function of the step, or its caches.

    facts : vocabularies and weights.
    share : of the positions of the first sequences, those with a token that takes part in the loss.
    """

    online: SurrogateTopTokens | None
    cached: tuple[np.ndarray, ...]
    facts: dict[str, Any]
    share: float = 0.0


def run_sdce(
    settings: SdceSettings, *, fresh: bool = False, mirror: str = "auto", on_status: Status = print
) -> dict[str, Any]:
    """Train, resume or load the finished run of these settings; return its result, as stored in result.json.

    With torchrun or on a TPU slice every process calls this; the first one writes.
    """
    first = is_writing_process()
    say = on_status if first else (lambda line: None)
    spec, device = training_spec(settings)
    say(batch_arithmetic(settings, device.batch_share_count, on_tpu=device.kind == "xla"))
    workspace = Workspace(root_of_output(settings.training.output_dir))
    try:
        run, done = agree_on_run(workspace, NAME, settings.identity() | {"batch": spec.batch}, device.processes, fresh)
        if done is not None:
            say(f"finished before: {run.folder}")
            return done
        with deterministic_device(device):
            return _train(settings, spec, device, workspace, run, mirror, say)
    finally:
        if first:
            workspace.push()


def training_spec(settings: SdceSettings) -> tuple[TrainSpec, Device]:
    """Return the settings of the loop, with the batch of all devices together, and the device."""
    given = settings.training
    check_number_of_hosts(given.tpu_num_hosts)
    common = {"device": DEVICES[given.device], "precision": settings.precision, "threads": given.threads}
    device = pick_device(TrainSpec(**common))
    accumulate = given.gradient_accumulation_steps
    spec = TrainSpec(
        epochs=given.num_epochs, batch=given.per_device_train_batch_size * device.batch_share_count * accumulate,
        accumulate=accumulate, lr=given.learning_rate, weight_decay=given.weight_decay, warmup=given.warmup_ratio,
        patience=given.patience, clip=given.max_grad_norm, seed=given.seed, log_steps=given.log_steps,
        eval_batch=given.per_device_train_batch_size * device.chips, save_seconds=given.save_seconds,
        recompute=settings.model.gradient_checkpointing, **common,
    )  # fmt: skip
    return spec, device


def batch_arithmetic(settings: SdceSettings, chips: int, *, on_tpu: bool) -> str:
    """Format how many sequences and tokens a step has. chips : devices that were found."""
    given = settings.training
    each, parts = given.per_device_train_batch_size, given.gradient_accumulation_steps
    total = each * chips * parts
    line = (
        f"batch: {each} sequences a device x {chips} devices x {parts} accumulated = {total:,} sequences, "
        f"{total * settings.data.max_seq_length:,} tokens a step"
    )
    named = given.tpu_cores * given.tpu_num_hosts
    if on_tpu and named and named != chips:
        line += (
            f" (--tpu_cores {given.tpu_cores} x --tpu_num_hosts {given.tpu_num_hosts} names {named}; this slice has "
            f"{chips} chips: the number in a v4's name counts cores, of which a chip has two)"
        )
    return line


# ---------------------------------------------------------------------- what is trained, and on what


def _pack(settings: SdceSettings, base: LanguageModel, say: Status) -> _Rows:
    """Return the packed sequences of the text; the last share of them is held out."""
    data = settings.data
    source = open_text(data.dataset_name, data.dataset_config, data.split, data.text_column)
    made_of = [source.fingerprint, base.tokenizer.fingerprint, data.max_seq_length, data.max_tokens]
    fingerprint = fingerprint_json(made_of)[:16]
    folder = _cache_folder(settings) / f"tokens-{fingerprint}"
    rows = pack_tokens(source, base.tokenizer, data.max_seq_length, folder, most=data.max_tokens)
    held_out = max(round(len(rows) * data.validation_share), 1)
    if len(rows) <= held_out:
        raise SettingsError("Too little text to hold some out", where="data", got=f"{len(rows)} sequences",
                            wanted="at least 2", next_step="more text, or a smaller max_seq_length")  # fmt: skip
    say(f"text: {len(rows):,} sequences of {data.max_seq_length} tokens, the last {held_out:,} held out")
    cut = len(rows) - held_out
    return _Rows(rows[:cut], rows[cut:], fingerprint)


def _cache_folder(settings: SdceSettings) -> Path:
    given = settings.surrogate.cache_dir
    return Path(given).expanduser() if given else local_cache_folder(NAME)


def _load_surrogate(
    settings: SdceSettings, base: LanguageModel, rows: _Rows, device: Device, say: Status
) -> _Surrogate:
    """Check the surrogate on the host, join the vocabularies, and cache its tokens where the settings want it."""
    given, length = settings.surrogate, settings.data.max_seq_length
    if device.kind == "xla" and given.dtype == "float16":
        raise SettingsError("A TPU has no fp16", where="surrogate.dtype", got="float16", wanted="bfloat16 or float32")
    model = load_causal_model(given.name_or_path, length, seed=settings.training.seed, dtype=given.dtype).check(length)
    join = join_vocabularies(base.tokenizer, model.tokenizer, base.vocabulary, model.vocabulary)
    say(f"vocabulary: {join.matched:,} of {join.size:,} tokens ({join.share:.1%}) of {base.name} are in {model.name}")
    join.check(base.name, model.name)
    facts = {"weights": weights_fingerprint(model.network), "vocabulary_share": join.share,
             "text_share": _share_of_text(join, rows.train)}  # fmt: skip
    at_once = given.rows_at_once or (1 if device.kind == "cpu" else 4)
    top_tokens = SurrogateTopTokens(model.network, join, given.k, model.tokenizer.end, device, at_once)
    share = _share_with_token(top_tokens, rows.train, given.probability_threshold, say)
    if given.cache == "none":
        return _Surrogate(top_tokens, (), facts, share)
    made_of = [rows.fingerprint, len(rows.train), facts["weights"], model.tokenizer.fingerprint, given.k, at_once,
               given.cache, device.kind]  # fmt: skip
    folder = _cache_folder(settings) / f"surrogate-{fingerprint_json(made_of)[:16]}"
    cached = cache_top_tokens(rows.train, top_tokens, folder, given.cache)
    say(f"surrogate: {given.k} tokens a position cached in {folder}")
    return _Surrogate(None, cached, facts, share)


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


def _share_of_text(join: VocabularyJoin, rows: np.ndarray) -> float:
    return join.share_of_text(rows[:1000])


def _feed(device: Device, parts: list[np.ndarray]) -> BatchLoader:
    """Return the loader of these rows, in memory where they are few, with a weight of 1 for each."""
    few = sum(part.nbytes for part in parts) <= IN_MEMORY
    weights = np.ones(len(parts[0]), np.float32)
    return BatchLoader(device, [*(np.array(part) if few else part for part in parts), weights], None if few else False)


# ---------------------------------------------------------------------- the training


def _train(
    settings: SdceSettings, spec: TrainSpec, device: Device, workspace: Workspace, run: RunFolder, mirror: str,
    say: Status,
) -> dict[str, Any]:  # fmt: skip
    """Train or resume, evaluate, and store the result and the model."""
    model = settings.model
    base = load_causal_model(
        model.name_or_path, settings.data.max_seq_length, seed=spec.seed, from_scratch=model.init_from_scratch
    ).check(settings.data.max_seq_length)
    rows = _pack(settings, base, say)
    surrogate = (
        _load_surrogate(settings, base, rows, device, say) if settings.needs_surrogate else _Surrogate(None, (), {})
    )
    feed, held_feed = _feed(device, [rows.train, *surrogate.cached]), _feed(device, [rows.held_out])
    loss = SurrogateLoss(
        settings.training.loss_type, settings.surrogate.loss_weight_initial, settings.surrogate.loss_weight_final,
        threshold=settings.surrogate.probability_threshold, top_tokens=surrogate.online,
    )  # fmt: skip
    identity = {"model": NAME, "settings": settings.identity() | {"loop": spec.identity()},
                "data": {"tokens": rows.fingerprint, "rows": len(rows.train), **surrogate.facts}}  # fmt: skip

    def held_out_loss() -> float:
        return evaluate_mean_loss(base.network, held_feed, next_token_loss, device, spec.eval_batch)

    with ExitStack() as stack:
        opened, checkpoints = stack.enter_context(open_run_of_process(
            workspace, NAME, run, dataclasses.asdict(settings), device.processes, libraries=("transformers",),
            threads=device.threads, mirror=mirror, project=settings.training.wandb_project,
        ))  # fmt: skip
        before = held_out_loss()
        result = run_training_loop(
            base.network, len(feed), feed, loss, spec, device, identity=identity, validation=Validation(held_out_loss),
            callbacks=opened.callbacks if opened else (), checkpoints=checkpoints,
        )  # fmt: skip
        after = held_out_loss()
        if opened is None:
            return {}
        facts = _result(settings, spec, base, rows, surrogate, result, before, after)
        facts["inexact"] = merge_inexact_reasons(result.nondeterminism, opened.checkpoints.machine_differences)
        write_folder(run.folder / "model", base.write)
        facts |= {"run_id": run.run_id, "model": str(run.folder / "model")}
        opened.finish(facts, {name: facts[name] for name in ("loss", "perplexity", "ngram_loss", "best_epoch")})
    return facts


def _result(
    settings: SdceSettings, spec: TrainSpec, base: LanguageModel, rows: _Rows, surrogate: _Surrogate,
    result: ModelFitResult, before: float, after: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the facts of the finished training; losses are mean nats a token of the held-out sequences."""
    length = settings.data.max_seq_length
    most = max(NGRAM_TOKENS // length, 1)
    losses = NgramModel(rows.train[:most], base.vocabulary, ORDER).mean_losses(rows.held_out[:most])
    order = int(np.argmin(losses))
    return {
        "loss_type": settings.training.loss_type, "loss": after, "perplexity": math.exp(min(after, 700.0)),
        "loss_before": before, "ngram_order": order + 1, "ngram_loss": losses[order],
        "ngram_perplexity": math.exp(losses[order]), "better_than_ngram": after < losses[order],
        "best_epoch": result.best_epoch, "history": result.history, "exact": result.exact,
        "batch": spec.batch, "sequences": len(rows.train), "held_out": len(rows.held_out),
        "tokens_per_second": (result.machine.get("rows_per_second") or 0.0) * length,
        "machine": result.machine, "resumed_step": result.resumed_step,
        "surrogate": surrogate.facts and surrogate.facts | {"positions_with_token": surrogate.share},
    }  # fmt: skip


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
