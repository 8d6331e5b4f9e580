"""lm-eval's tasks on an exported model. Importing this needs lm-eval and the worker's libraries."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from outerstep.models import load_export
from protocol.errors import SpecError
from protocol.spec.run import parse_spec
from worker.allowing import NOTHING, Allowed
from worker.errors import ModelError
from worker.starting import choose_device


def run_tasks(
    directory: Path,
    tasks: Sequence[str],
    device: str,
    allowed: Allowed = NOTHING,
    ask: Callable[[str], bool] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return lm-eval's metrics of an export, by task. A task is the name of one of lm-eval's, or a YAML file. Code and
    places that the export's spec names must be `allowed`, or the owner says yes to `ask`. For a model that was trained
    on conversations, tasks are rendered by its chat template.

    Raises NotAllowed, ModelError for a directory without a tokenizer or model, ValueError for an unknown task.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory} has no tokenizer, which lm-eval's tasks need: {error}") from error
    manager = TaskManager()
    chosen = [_task(task, manager) for task in tasks]
    loaded = load_export(directory, None, allowed, ask=ask).to(choose_device(device))
    model = HFLM(pretrained=loaded, tokenizer=tokenizer)
    conversational = tokenizer.chat_template is not None and _row_format(directory) == "chat"
    found = simple_evaluate(model=model, tasks=chosen, task_manager=manager, apply_chat_template=conversational)
    results: dict[str, dict[str, Any]] = found["results"]
    return results


def _row_format(directory: Path) -> str | None:
    """Return the `data.format` of the run that was exported; None if there is no spec."""
    try:
        return parse_spec((directory / "spec.toml").read_text()).data.format
    except (OSError, UnicodeDecodeError, SpecError):
        return None


def _task(name: str, manager: TaskManager) -> str | dict[str, Any]:
    if not name.endswith((".yaml", ".yml")):
        if name not in manager.all_tasks:
            raise ValueError(f"lm-eval has no task {name!r}")
        return name
    try:
        config = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{name} is not a task: {error}") from error
    if not isinstance(config, dict) or "task" not in config:
        raise ValueError(f"{name} is not a task: it has no key `task`")
    return config
