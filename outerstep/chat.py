"""A conversation with a model in the terminal. Importing this needs torch and transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import torch
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer

from outerstep.models import load_export
from protocol.spec.model import MAX_PARAMETERS
from worker.allowing import NOTHING, OF_MODEL, Allowed, permit
from worker.data.tokens.conversations import ChatTemplate, load_chat_template, no_template
from worker.data.tokens.rendering import renderer
from worker.data.tokens.tokenizer import Tokenizer, load_tokenizer
from worker.errors import DataError, ModelError
from worker.export import load_checkpoint, tokenizer_of
from worker.link.client import Client
from worker.starting import choose_device

_INCOMPLETE = "\ufffd"  # what a decoder shows for a part of a character


class Chat:
    """A conversation. `messages` are those so far."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        max_tokens: int = 512,
        temperature: float | None = None,
    ) -> None:
        """Raises ModelError if the model cannot generate text, and DataError if the tokenizer has no chat template.

        max_tokens   the most tokens of an answer
        temperature  0: always the most likely token; None: as the model's generation_config says
        """
        if not callable(getattr(model, "generate", None)):
            raise ModelError(f"{type(model).__name__} has no generate(): only models of transformers can be talked to")
        template = load_chat_template(tokenizer)
        if template is None:
            raise no_template(tokenizer)
        model.eval()
        self._model = cast("Any", model)
        self._template: ChatTemplate = template
        self._child = renderer()
        self._fast = tokenizer.fast()
        self._fast.encode_special_tokens = False
        self._max_tokens, self._sampling = max_tokens, _sampling(temperature)
        self._end = sorted({*_ids(self._model.generation_config.eos_token_id), *_ids(tokenizer.end)})
        self._context: int | None = getattr(self._model.config, "max_position_embeddings", None)
        for config in (self._model.config, self._model.generation_config):
            config.use_cache = True
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages = list(self._system)

    @torch.no_grad()
    def ask(self, question: str, show: Callable[[str], object]) -> str:
        """Return the answer to the next message; `show` gets its text as it is generated. After an exception the
        conversation is unchanged. Raises DataError if it leaves no room for an answer."""
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = self._template.prompt(self._child, messages)
        ids = torch.tensor([self._fast.encode(prompt, add_special_tokens=False).ids])
        room = self._max_tokens if self._context is None else min(self._max_tokens, self._context - ids.shape[1])
        if room < 1:
            raise DataError(f"the conversation has {ids.shape[1]} tokens, and the model takes {self._context}")
        text = _Text(self._fast, show)
        device = next(self._model.parameters()).device
        self._model.generate(
            input_ids=ids.to(device),
            attention_mask=torch.ones_like(ids, device=device),
            max_new_tokens=room,
            eos_token_id=self._end or None,
            pad_token_id=self._end[0] if self._end else 0,
            streamer=text,
            **self._sampling,
        )
        self.messages = [*messages, {"role": "assistant", "content": text.shown}]
        return text.shown


class _Text(BaseStreamer):
    """Decodes tokens as they are generated. `shown` is the text so far."""

    def __init__(self, fast: Any, show: Callable[[str], object]) -> None:
        self._fast, self._show = fast, show
        self._ids: list[int] = []
        self._prompt_is_past = False
        self.shown = ""

    def put(self, value: Tensor) -> None:
        if not self._prompt_is_past:  # generate() begins with the prompt
            self._prompt_is_past = True
            return
        self._ids += value.flatten().tolist()
        text = self._fast.decode(self._ids, skip_special_tokens=True)
        if not text.endswith(_INCOMPLETE):
            self._add(text)

    def end(self) -> None:
        self._add(self._fast.decode(self._ids, skip_special_tokens=True))

    def _add(self, text: str) -> None:
        if len(text) > len(self.shown):
            self._show(text[len(self.shown) :])
            self.shown = text


def _sampling(temperature: float | None) -> dict[str, Any]:
    if temperature is None:
        return {}
    return {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False, "temperature": None}


def _ids(found: Any) -> list[int]:
    return [] if found is None else list(found) if isinstance(found, list | tuple) else [int(found)]


def of_run(
    http: httpx.Client,
    run: str,
    token: str,
    device: str,
    state: int | None,
    allowed: Allowed = NOTHING,
    max_parameters: int = MAX_PARAMETERS,
    ask: Callable[[str], bool] | None = None,
) -> tuple[nn.Module, Tokenizer]:
    """Return the model of a run before round `state` (None: the latest checkpoint), on `device`, and its tokenizer.
    Code and places that its spec names must be `allowed`, or the owner says yes to `ask`. Raises NotAllowed, DataError
    if this machine does not have the tokenizer, ValueError for an unknown device, and what `load_checkpoint` raises."""
    client = Client(http, run, token)
    found = choose_device(device)
    detail = client.run_detail()
    allowed = permit(detail.spec, allowed, ask, (*OF_MODEL, "data.tokenizer"))
    tokenizer = tokenizer_of(detail)
    if tokenizer is None:
        raise DataError(f"the tokenizer of the run {run} is not on this machine; export the run on a worker's machine")
    return load_checkpoint(client, state, allowed.factories, max_parameters).to(found), tokenizer


def of_export(
    directory: Path,
    device: str,
    allowed: Allowed = NOTHING,
    max_parameters: int = MAX_PARAMETERS,
    ask: Callable[[str], bool] | None = None,
) -> tuple[nn.Module, Tokenizer]:
    """Return the model in a directory written by `outerstep run export`, on `device`, and its tokenizer. Raises what
    `load_export` raises, DataError if there is no tokenizer, and ValueError for an unknown device."""
    found = choose_device(device)
    model = load_export(directory, allowed, max_parameters, ask)
    return model.to(found), load_tokenizer(str(directory))
