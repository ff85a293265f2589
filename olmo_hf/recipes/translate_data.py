"""Training data and evaluators of an original configuration in our words."""

from collections.abc import Mapping, Sequence
from typing import Any

from olmo_hf.data.mixes import mix_names, read_mix
from olmo_hf.evaluation.tasks.table import original_tasks
from olmo_hf.recipes.ledger import Ledger
from olmo_hf.recipes.original_defaults import DATA, INSTANCE_FILTER
from olmo_hf.settings.problems import nearest

_NO_EFFECT = {
    "pad_direction": "instances have one length; nothing is padded",
    "drop_last": "only whole global batches are trained on",
    "persistent_workers": "workers live as long as the run",
    "timeout": "workers are waited for",
    "token_field": "the original never reads it",
}


def translate_data(ledger: Ledger, data: Mapping[str, Any], *, sequence_length: int) -> None:
    """Sets `data.*`."""
    ledger.settings["data.sequence_length"] = sequence_length
    _paths(ledger, data)
    for key in ledger.below("data.custom_dataset"):
        if ledger.given[key] is None:
            ledger.no_effect(key, "off")
        else:
            ledger.refuse(
                key, "data sets of foreign classes are not read; write token files with `olmo-hf prepare-data`"
            )
    ledger.keep("data.memmap_dtype", "data.token_dtype")
    if ledger.value("data.label_mask_paths") is None:
        ledger.no_effect("data.label_mask_paths", "off")
    else:
        ledger.keep("data.label_mask_paths", "data.label_mask_paths")
    if ledger.value("data.generate_attention_mask"):
        ledger.refuse("data.generate_attention_mask", "padding is never seen here, so no mask is made for it")
    else:
        ledger.no_effect("data.generate_attention_mask", "off")
    ledger.translate(
        "data.generate_doc_lengths", "data.document_masking", bool(ledger.value("data.generate_doc_lengths"))
    )
    ledger.keep("data.num_workers", "data.num_workers")
    ledger.keep("data.pin_memory", "data.pin_memory")
    if ledger.value("data.prefetch_factor") is None:
        ledger.no_effect("data.prefetch_factor", "the loader's own default")
    else:
        ledger.keep("data.prefetch_factor", "data.prefetch_factor")
    ledger.keep("data.seed", "data.seed")
    _instance_filter(ledger)
    for name, note in _NO_EFFECT.items():
        ledger.no_effect(f"data.{name}", note)


def _instance_filter(ledger: Ledger) -> None:
    ledger.no_effect("data.instance_filter", "off")
    present = [key for key in ledger.given if key.startswith("data.instance_filter.")]
    for name, default in INSTANCE_FILTER.items() if present else ():
        key, ours = f"data.instance_filter.{name}", f"data.instance_filter.{name}"
        if key in ledger.given:
            ledger.keep(key, ours)
        else:
            ledger.put(ours, default, f"the original's default of {key}")


def _paths(ledger: Ledger, data: Mapping[str, Any]) -> None:
    listed, sets = data.get("paths"), data.get("datasets")
    if listed is None:
        ledger.no_effect("data.paths", "not set")
    elif sets is not None:
        ledger.refuse("data.paths", "is set beside data.datasets, which the original refuses")
    else:
        _write_paths(ledger, "data.paths", _flat(listed))
    keys = ledger.below("data.datasets")
    if not isinstance(sets, dict) or not sets:
        for key in keys:
            ledger.no_effect(key, "not set")
        return
    files = [path for label in sorted(sets) for path in _flat(sets[label])]
    if listed is None:
        ledger.settings["data.paths"] = files
    for key in keys:
        ledger.judge(key, "translated", "data.paths", "labels in alphabetical order, as the original reads them")


def _write_paths(ledger: Ledger, key: str, paths: list[str]) -> None:
    """A published list is named, any other is written out."""
    for name in mix_names():
        mix = read_mix(name)
        if len(paths) == len(mix.relative_paths) and paths[0].endswith(mix.relative_paths[0]):
            base = paths[0].removesuffix(mix.relative_paths[0])
            if paths == mix.paths(base) and base.endswith("/"):
                ledger.translate(key, "data.mix", name, f"these {len(paths)} files in this order, below {base}")
                ledger.settings["data.mix_base"] = base.rstrip("/")
                return
    ledger.settings["data.paths"] = paths
    ledger.judge(key, "kept", "data.paths", "")


def _flat(listed: Any) -> list[str]:
    if isinstance(listed, list):
        return [path for item in listed for path in _flat(item)]
    return [] if listed is None else [str(listed)]


def translate_evaluators(ledger: Ledger, evaluators: Sequence[Any], *, sequence_length: int) -> None:
    """Sets `evaluation.*`: perplexity by data set, and tasks under the same labels."""
    ledger.keep("eval_interval", "evaluation.interval")
    ledger.keep("eval_on_load", "evaluation.on_load")
    ledger.no_effect("evaluators", "none")
    ours: list[dict[str, Any]] = []
    subset = ledger.value("eval_subset_num_batches")
    batch = ledger.value("device_eval_batch_size")
    limits = False
    for place, evaluator in enumerate(evaluators):
        prefix = f"evaluators[{place}]"
        if not isinstance(evaluator, dict):
            ledger.refuse(prefix, "expected a block with label and type")
        elif evaluator.get("type", "lm") == "lm":
            most = _most_instances(evaluator, subset, batch)
            limits = limits or most is not None
            ours += _perplexity(evaluator, most, sequence_length)
            _judge_perplexity(ledger, prefix, most)
        else:
            most = _most_instances(evaluator, subset, batch)
            limits = limits or most is not None
            _add_task(ledger, ours, evaluator, prefix, most)
    ledger.settings["evaluation.evaluators"] = ours
    note = "written as instances of one device; the original counts them on every device" if limits else "all batches"
    ledger.judge("eval_subset_num_batches", "translated" if limits else "without effect", "", note)


def _add_task(
    ledger: Ledger, ours: list[dict[str, Any]], evaluator: Mapping[str, Any], prefix: str, most: int | None
) -> None:
    """One task; those that follow each other and are limited alike stand in one block."""
    label = str(evaluator.get("label"))
    known = original_tasks()
    if label not in known:
        near = nearest(label, known)
        ledger.refuse(f"{prefix}.label", f"there is no such task{'' if near is None else f'; did you mean {near}?'}")
    else:
        # The original counts continuations, of which a question has about four.
        limit = {} if most is None else {"max_instances": max(1, most // 4)}
        last = ours[-1] if ours else {}
        if last.get("type") != "downstream" or last.get("max_instances") != limit.get("max_instances"):
            ours.append({"type": "downstream", "tasks": [], **limit})
        ours[-1]["tasks"].append(label)
        ledger.judge(f"{prefix}.label", "translated", "evaluation.evaluators", "the same task")
    for key in ledger.below(f"{prefix}."):
        name = key.removeprefix(f"{prefix}.")
        if name == "type":
            ledger.judge(key, "translated", "evaluation.evaluators", "")
        elif name == "subset_num_batches" and most is not None:
            ledger.judge(key, "translated", "evaluation.evaluators", "as questions of four continuations")
        elif name.startswith("data.") or name in ("device_eval_batch_size", "subset_num_batches"):
            ledger.no_effect(key, "speed and memory of evaluation only")
        else:
            ledger.refuse(key, "tasks have no such setting here")


def _most_instances(evaluator: Mapping[str, Any], subset: int, batch: int) -> int | None:
    own, size = evaluator.get("subset_num_batches"), evaluator.get("device_eval_batch_size")
    batches = own if isinstance(own, int) else subset
    return None if batches <= 0 else batches * (size if isinstance(size, int) else batch)


def _perplexity(evaluator: Mapping[str, Any], most: int | None, sequence_length: int) -> list[dict[str, Any]]:
    data = evaluator.get("data") or {}
    sets = data.get("datasets") or {evaluator.get("label"): data.get("paths")}
    made = []
    for label in sorted(sets, key=str):
        section: dict[str, Any] = {
            "paths": _flat(sets[label]),
            "token_dtype": data.get("memmap_dtype", DATA["memmap_dtype"]),
            "sequence_length": sequence_length,
        }
        if data.get("generate_doc_lengths"):
            section["document_masking"] = True
        one = {"label": str(label), "type": "perplexity", "mean_over": "instances", "data": section}
        made.append(one | ({} if most is None else {"max_instances": most}))
    return made


def _judge_perplexity(ledger: Ledger, prefix: str, most: int | None) -> None:
    translated = {"label", "type", "data.paths", "data.memmap_dtype", "data.generate_doc_lengths"}
    translated |= {"subset_num_batches"} if most is not None else set()
    for key in ledger.below(f"{prefix}."):
        name = key.removeprefix(f"{prefix}.")
        if name in translated or name.startswith("data.datasets"):
            ledger.judge(key, "translated", "evaluation.evaluators", "one evaluator per data set")
        elif name in ("data.instance_filter", "data.label_mask_paths", "data.seed") and ledger.given[key] is None:
            ledger.no_effect(key, "off")
        elif name.removeprefix("data.") in _NO_EFFECT or name in ("data.num_workers", "data.prefetch_factor"):
            ledger.no_effect(key, "evaluation reads every instance once, in file order")
        elif name in ("data.pin_memory", "device_eval_batch_size", "subset_num_batches"):
            ledger.no_effect(key, "speed and memory of evaluation only")
        elif name == "data.generate_attention_mask" and not ledger.given[key]:
            ledger.no_effect(key, "off")
        else:
            ledger.refuse(key, "evaluators have no such setting here")
