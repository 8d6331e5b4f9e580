"""What a run spec may make of this machine: only what the machine's owner has allowed.

A spec is somebody else's text, and some of its strings are more than settings: `model.factory` and `inner.optimizer`
may name code, which is imported and run; `data.source`, `data.tokenizer` and `model.pretrained` name places, which are
read or fetched, and whatever is trained on can be learnt of what is sent. So code needs its very name
(`--allow-factory`), and a place needs a root that it lies below (`--data-root`): a directory, compared after links and
`..` are resolved; the beginning of an address; or `hub:NAME`, a repository of the Hugging Face hub or all of an
organisation's, which is fetched with this machine's own login. Nothing is needed for the text and the models that come
with Outerstep, and for what the owner names himself.
"""

import glob
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from protocol.spec.run import RunSpec
from protocol.spec.sections import OPTIMIZERS
from worker.data.fetching.remote import HUB, is_remote
from worker.data.sources.files import PYTHON_STDLIB, source_files
from worker.data.sources.hub import PREFIX
from worker.data.tokens.tokenizer import IN_BYTES
from worker.errors import DataError, NotAllowed
from worker.settings import BoxSettings

ALLOW_FACTORY, DATA_ROOT = "--allow-factory", "--data-root"
_SCRIPT = "custom"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LINKS_AT_ONCE = 8  # that are told of and asked about

Root = str | Path  # the beginning of an address, or a directory


@dataclass(frozen=True)
class Refusal:
    """What a spec asks for that is not allowed, and the option that allows it."""

    what: str
    option: str
    value: str


@dataclass(frozen=True)
class Allowed:
    """What an owner allows: `factories` by name, places below `roots`, and any `data.source` where it is his own."""

    factories: tuple[str, ...] = ()
    roots: tuple[str, ...] = ()
    own_source: bool = False

    def and_also(self, refused: list[Refusal]) -> "Allowed":
        """Return this with all that was refused."""
        code, roots = ([e.value for e in refused if e.option == option] for option in (ALLOW_FACTORY, DATA_ROOT))
        return replace(self, factories=(*self.factories, *code), roots=(*self.roots, *roots))


def allowed_by(settings: BoxSettings) -> Allowed:
    """Return what the settings of a worker allow."""
    return Allowed(settings.allow_factory, settings.data_root, own_source=settings.data is not None)


def permit(spec: RunSpec, allowed: Allowed, ask: Callable[[str], bool] | None = None) -> None:
    """Return if the spec asks for nothing that is not allowed, or the owner allows it now: `ask` puts the question to
    him, where he can be asked. Raises NotAllowed, and DataError for places that cannot be."""
    while refused := not_allowed(spec, allowed):
        told = f"the run {spec.name} asks for what the owner of this machine has not allowed: "
        told += "; ".join(each.what for each in refused)
        if ask is None or not ask(f"{told}. Allow it?"):
            raise NotAllowed(f"{told}. If you trust whoever wrote its spec, add: {as_options(refused)}")
        allowed = allowed.and_also(refused)


def permit_factory(spec: RunSpec, factories: tuple[str, ...]) -> None:
    """Return if the spec's model can be built without code that is not among `factories`. Raises NotAllowed."""
    if refused := [each for each in _code(spec, factories) if each.value == spec.model.factory]:
        raise NotAllowed(f"{refused[0].what}. If you trust whoever wrote it, add: {as_options(refused)}")


def permit_data(spec: RunSpec, roots: tuple[str, ...], *, own_source: bool) -> None:
    """Return if the spec's data and tokenizer lie below `roots`; with `own_source` the source is the owner's own.
    Raises NotAllowed, and DataError for places that cannot be."""
    refused = [
        each for each in not_allowed(spec, Allowed((), roots, own_source=own_source)) if each.option == DATA_ROOT
    ]
    if refused := [each for each in refused if each.what.startswith("data.")]:
        told, needed = "; ".join(each.what for each in refused), [each.value for each in refused]
        raise NotAllowed(f"{told}. If you trust whoever wrote the spec, give training_set(data_root={needed})")


def options_for(spec: RunSpec) -> list[str]:
    """Return the options with which a worker trains a run whose spec its owner wrote himself."""
    allowed = Allowed()
    while refused := not_allowed(spec, allowed):
        allowed = allowed.and_also(refused)
    pairs = [(ALLOW_FACTORY, name) for name in allowed.factories] + [(DATA_ROOT, root) for root in allowed.roots]
    return _words(pairs)


def not_allowed(spec: RunSpec, allowed: Allowed) -> list[Refusal]:
    """Return all that the spec asks for and that is not allowed. Raises DataError for places that cannot be."""
    roots = [_root(root) for root in allowed.roots]
    refused = [*_code(spec, allowed.factories), *_places(spec, roots)]
    if not allowed.own_source:
        refused += _source(spec.data.source, roots)
    return list(dict.fromkeys(refused))


def _code(spec: RunSpec, factories: tuple[str, ...]) -> Iterator[Refusal]:
    for key, name in (("model.factory", spec.model.factory), ("inner.optimizer", spec.inner.optimizer)):
        if name is not None and name not in OPTIMIZERS and name not in factories:
            yield Refusal(f"{key} = {name!r} is code that would run here", ALLOW_FACTORY, name)


def _places(spec: RunSpec, roots: list[Root]) -> Iterator[Refusal]:
    """Yield what is refused of the places that are a directory here, or else a repository of the hub."""
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
    if source.startswith(PREFIX):  # which datasets takes for a directory where there is one
        yield from _directory(key, _repository(source), roots, shown=source)
        return
    refused = list(_directory(key, str(_without_wildcards(key, source)), roots, shown=source))
    yield from refused or _links(key, source, roots)


def _without_wildcards(key: str, source: str) -> Path:
    """Return what a source names, of a glob the part before its first wildcard."""
    path = _expanded(key, source)
    at = next((number for number, part in enumerate(path.parts) if glob.has_magic(part)), None)
    if at is None or _is_dir(path):
        return path
    if ".." in path.parts[at:]:
        raise DataError(f"{key} = {source!r} has '..' behind a wildcard; name the directory itself")
    return Path(*path.parts[:at])


def _links(key: str, source: str, roots: list[Root]) -> Iterator[Refusal]:
    """Yield what is refused of the files of a source that is allowed: those that are links to elsewhere."""
    found: dict[Path, Path] = {}
    for _, file in source_files(source):
        real = Path(os.path.realpath(file))
        if not _is_below(real, roots):
            found.setdefault(real.parent, file)
    for place, file in islice(found.items(), _LINKS_AT_ONCE):
        yield Refusal(f"{key} = {source!r} has {str(file)!r}, a link into {str(place)!r}", DATA_ROOT, str(place))


def _directory(key: str, name: str, roots: list[Root], *, shown: str | None = None) -> Iterator[Refusal]:
    real = _real(key, name)
    if not _is_below(real, roots):
        yield Refusal(f"{key} = {shown or name!r} reads files of this machine", DATA_ROOT, str(real))


def _remote(key: str, name: str, address: str, roots: list[Root]) -> Iterator[Refusal]:
    if not any(isinstance(root, str) and _covers(root, address) for root in roots):
        where = "from the Hugging Face hub" if address.startswith(PREFIX) else "from there"
        yield Refusal(f"{key} = {name!r} is fetched {where}", DATA_ROOT, address)


def _is_below(path: Path, roots: list[Root]) -> bool:
    return any(isinstance(root, Path) and path.is_relative_to(root) for root in roots)


def _covers(root: str, address: str) -> bool:
    """Return True if the address is the root or begins with it, up to the end of a part."""
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
    """Return the address that a source is fetched from, the hub's as hub:NAME; None for a path."""
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
    """Return the name in hub:NAME[:CONFIG[:SPLIT]]."""
    return source.removeprefix(PREFIX).partition(":")[0]


def _is_local(key: str, name: str) -> bool:
    """Return True for a directory here, and for what can be no repository of the hub."""
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
        raise DataError(f"{key} = {name!r} can be no place on this machine: {error}") from error


def _expanded(key: str, name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # the home of nobody
        raise DataError(f"{key} = {name!r} can be no place on this machine: {error}") from error


def as_options(refused: list[Refusal]) -> str:
    """Return the options that allow it, as they are as_options."""
    return shlex.join(_words([(each.option, each.value) for each in refused]))


def _words(options: list[tuple[str, str]]) -> list[str]:
    return [word for option in dict.fromkeys(options) for word in option]
