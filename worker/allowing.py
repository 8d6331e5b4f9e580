"""What a run spec may do on this machine: only what the machine's owner has allowed.

Somebody else writes the spec, and some of its strings are more than settings. `model.factory` and `inner.optimizer` may
name code, which is imported and run; `data.source`, `data.tokenizer` and `model.pretrained` name places that are read
or fetched, and what a worker trains on can be inferred from what it sends. So code must be allowed by its exact name
(`--allow-code`), and a place must be below an allowed root (`--data-root`): a directory, compared after links and
`..` are resolved; the beginning of an address; or `hub:NAME`, a repository of the Hugging Face hub or all of an
organisation's, fetched with this machine's own login. The text and the models that come with Outerstep are always
allowed, and so is what the owner names himself.
"""

import glob
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from protocol.spec.run import RunSpec
from protocol.spec.sections import OPTIMIZERS
from worker.data.fetching.remote_files import HUB, is_remote
from worker.data.sources.files import PYTHON_STDLIB, source_files
from worker.data.sources.hub import PREFIX
from worker.data.tokens.tokenizer import IN_BYTES
from worker.errors import DataError, NotAllowed
from worker.settings import BoxSettings

ALLOW_CODE, DATA_ROOT = "--allow-code", "--data-root"
OF_MODEL, OF_DATA = ("model.factory", "model.pretrained"), ("data.source", "data.tokenizer")
ALL = (*OF_MODEL, *OF_DATA, "inner.optimizer")  # the keys of a spec that name code or places
_SCRIPT = "custom"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LINKS_AT_ONCE = 8  # that are reported and asked about

Root = str | Path  # the beginning of an address, or a directory


@dataclass(frozen=True)
class Refusal:
    """Something that the `key` of a spec asks for and that is not allowed, and the option that allows it."""

    key: str
    what: str
    option: str
    value: str


@dataclass(frozen=True)
class Allowed:
    """What an owner allows: `factories` by name, places below `roots`, and any `data.source` if it is the owner's
    own."""

    factories: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    own_source: bool = False

    def including(self, refused: list[Refusal]) -> "Allowed":
        """Return the same plus everything that was refused."""
        code, roots = ([e.value for e in refused if e.option == option] for option in (ALLOW_CODE, DATA_ROOT))
        return replace(self, factories=(*self.factories, *code), roots=(*self.roots, *roots))


NOTHING = Allowed()


def allowed_by(settings: BoxSettings) -> Allowed:
    """Return what a worker's settings allow."""
    return Allowed(settings.allow_code, settings.data_root, own_source=settings.data is not None)


def permit(
    spec: RunSpec, allowed: Allowed, ask: Callable[[str], bool] | None = None, keys: Sequence[str] = ALL
) -> Allowed:
    """Return what is allowed once everything that `keys` of the spec ask for is, or if the owner allows it now: `ask`
    asks a yes-or-no question; None if nobody can be asked. Raises NotAllowed, and DataError for places that cannot
    exist."""
    while refused := [each for each in not_allowed(spec, allowed) if each.key in keys]:
        refusal = f"the run {spec.name} asks for what the owner of this machine has not allowed: "
        refusal += "; ".join(each.what for each in refused)
        if ask is None or not ask(f"{refusal}. Allow it?"):
            raise NotAllowed(f"{refusal}. If you trust the author of its spec, add: {as_options(refused)}")
        allowed = allowed.including(refused)
    return allowed


def permit_factory(spec: RunSpec, factories: tuple[str, ...]) -> None:
    """Return if the spec's model can be built without code outside `factories`. Raises NotAllowed."""
    if refused := [each for each in _code(spec, factories) if each.key == "model.factory"]:
        raise NotAllowed(f"{refused[0].what}. If you trust its author, add: {as_options(refused)}")


def permit_data(spec: RunSpec, roots: tuple[str, ...], *, own_source: bool) -> None:
    """Return if the spec's data and tokenizer are below `roots`; `own_source`: the source is the owner's own. Raises
    NotAllowed, and DataError for places that cannot exist."""
    found = not_allowed(spec, Allowed((), roots, own_source=own_source))
    if refused := [each for each in found if each.key in OF_DATA]:
        places, needed = "; ".join(each.what for each in refused), [each.value for each in refused]
        raise NotAllowed(f"{places}. If you trust the author of the spec, give training_set(data_root={needed})")


def options_for(spec: RunSpec) -> list[str]:
    """Return the options that a worker needs for a run whose spec its owner has written."""
    allowed = Allowed()
    while refused := not_allowed(spec, allowed):
        allowed = allowed.including(refused)
    pairs = [(ALLOW_CODE, name) for name in allowed.factories] + [(DATA_ROOT, root) for root in allowed.roots]
    return _words(pairs)


def not_allowed(spec: RunSpec, allowed: Allowed) -> list[Refusal]:
    """Return everything that the spec asks for and that is not allowed. Raises DataError for places that cannot
    exist."""
    roots = [_root(root) for root in allowed.roots]
    refused = [*_code(spec, allowed.factories), *_places(spec, roots)]
    if not allowed.own_source:
        refused += _source(spec.data.source, roots)
    return list(dict.fromkeys(refused))


def _code(spec: RunSpec, factories: tuple[str, ...]) -> Iterator[Refusal]:
    for key, name in (("model.factory", spec.model.factory), ("inner.optimizer", spec.inner.optimizer)):
        if name is not None and name not in OPTIMIZERS and name not in factories:
            yield Refusal(key, f"{key} = {name!r} is code that would run here", ALLOW_CODE, name)


def _places(spec: RunSpec, roots: list[Root]) -> Iterator[Refusal]:
    """Yield the refused places that are a directory here, or else a repository of the hub."""
    for key, name in (("model.pretrained", spec.model.pretrained), ("data.tokenizer", spec.data.tokenizer)):
        if name is None or (key, name) == ("data.tokenizer", IN_BYTES):
            continue
        if _is_local(key, name):
            yield from _directory(key, name, roots)
        else:
            yield from _remote(key, name, PREFIX + name, roots)


def _source(source: str, roots: list[Root]) -> Iterator[Refusal]:
    key = "data.source"
    if source in (PYTHON_STDLIB, _SCRIPT):
        return
    if (address := _address(source)) is not None:
        yield from _remote(key, source, address, roots)
        return
    if source.startswith(PREFIX):  # if there is such a directory, datasets reads it
        yield from _directory(key, _repository(source), roots, shown=source)
        return
    refused = list(_directory(key, str(_without_wildcards(key, source)), roots, shown=source))
    yield from refused or _links(key, source, roots)


def _without_wildcards(key: str, source: str) -> Path:
    """Return the path of a source; of a glob, the part before its first wildcard."""
    path = _expanded(key, source)
    at = next((number for number, part in enumerate(path.parts) if glob.has_magic(part)), None)
    if at is None or _is_dir(path):
        return path
    if ".." in path.parts[at:]:
        raise DataError(f"{key} = {source!r} has '..' after a wildcard; name the directory itself")
    return Path(*path.parts[:at])


def _links(key: str, source: str, roots: list[Root]) -> Iterator[Refusal]:
    """Yield the refused links: files of an allowed source that are links to somewhere else."""
    found: dict[Path, Path] = {}
    for _, file in source_files(source):
        real = Path(os.path.realpath(file))
        if not _is_below(real, roots):
            found.setdefault(real.parent, file)
    for place, file in islice(found.items(), _LINKS_AT_ONCE):
        yield Refusal(key, f"{key} = {source!r} has {str(file)!r}, a link into {str(place)!r}", DATA_ROOT, str(place))


def _directory(key: str, name: str, roots: list[Root], *, shown: str | None = None) -> Iterator[Refusal]:
    real = _real(key, name)
    if not _is_below(real, roots):
        yield Refusal(key, f"{key} = {shown or name!r} reads files of this machine", DATA_ROOT, str(real))


def _remote(key: str, name: str, address: str, roots: list[Root]) -> Iterator[Refusal]:
    if not any(isinstance(root, str) and _covers(root, address) for root in roots):
        where = "from the Hugging Face hub" if address.startswith(PREFIX) else "from there"
        yield Refusal(key, f"{key} = {name!r} is fetched {where}", DATA_ROOT, address)


def _is_below(path: Path, roots: list[Root]) -> bool:
    return any(isinstance(root, Path) and path.is_relative_to(root) for root in roots)


def _covers(root: str, address: str) -> bool:
    """Return True if the address is the root or continues it after a whole part."""
    if address == root:
        return True
    rest = address[len(root) :]
    return address.startswith(root if root.endswith(("/", ":")) else f"{root}/") and not (
        set(re.split(r"[/\\]", rest)) & {".", ".."} or set("?#%") & set(rest)
    )


def _root(root: str) -> Root:
    address = PREFIX + _repository(root) if root.startswith(PREFIX) else _address(root)
    return _real(DATA_ROOT, root) if address is None else address


def _address(source: str) -> str | None:
    """Return the address that a source is fetched from, hub:NAME for the hub; None for a path."""
    if source.startswith(HUB):
        organisation, *rest = source.removeprefix(HUB[0]).removeprefix("datasets/").strip("/").split("/")
        if ".." in rest:  # it would lead into another repository
            raise DataError(f"data.source = {source!r} has '..' in it; name the folder itself")
        return PREFIX + "/".join([organisation, *(rest[0].partition("@")[:1] if rest else [])])
    if is_remote(source):
        return source if source.endswith("://") else source.rstrip("/")
    if source.startswith(PREFIX) and not _is_local("data.source", _repository(source)):
        return PREFIX + _repository(source)
    return None


def _repository(source: str) -> str:
    """Return NAME in hub:NAME[:CONFIG[:SPLIT]]."""
    return source.removeprefix(PREFIX).partition(":")[0]


def _is_local(key: str, name: str) -> bool:
    """Return True for a directory here, and for a name that is not valid on the hub."""
    return not _HUB_ID.fullmatch(name) or _is_dir(_expanded(key, name))


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name that is too long, a zero byte
        return False


def _real(key: str, name: str) -> Path:
    try:
        return _expanded(key, name).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a zero byte
        raise DataError(f"{key} = {name!r} is not a possible place on this machine: {error}") from error


def _expanded(key: str, name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # the home of an unknown user
        raise DataError(f"{key} = {name!r} is not a possible place on this machine: {error}") from error


def as_options(refused: list[Refusal]) -> str:
    """Return the options that allow what was refused, quoted for a shell."""
    return shlex.join(_words([(each.option, each.value) for each in refused]))


def _words(options: list[tuple[str, str]]) -> list[str]:
    return [word for option in dict.fromkeys(options) for word in option]
