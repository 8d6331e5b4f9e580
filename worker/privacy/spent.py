"""How many contributions have left this worker under [privacy], which is what epsilon grows with.

Counted before they leave, and durably: a process that is killed may count one that nobody has seen, but never the other
way round. One is a whole round's; where fragments leave one by one, each is its share of the parameters.
"""

import json
from dataclasses import dataclass

from worker.state.state_dir import StateDir

_FILE = "privacy.json"


@dataclass(frozen=True)
class Count:
    """Elements that have left, of a model that has `elements`."""

    left: int
    elements: int

    @property
    def contributions(self) -> float:
        return self.left / self.elements


class Spent:
    """The count of one run, in `files`; in memory alone where there is no directory. The file keeps those of other runs
    that this worker was in. Raises ValueError for a file that is damaged, and OSError."""

    def __init__(self, files: StateDir | None, owner: str, elements: int) -> None:
        self._files, self._owner = files, owner
        self._all = {} if files is None else _read(files)
        self._count = self._all.get(owner, Count(0, elements))

    @property
    def contributions(self) -> float:
        """Contributions that have left so far."""
        return self._count.contributions

    def add(self, elements: int) -> None:
        """Count what is about to leave; return once that is durable."""
        self._count = Count(self._count.left + elements, self._count.elements)
        if self._files is not None:
            self._all[self._owner] = self._count
            document = {owner: vars(count) for owner, count in self._all.items()}
            self._files.replace(_FILE, lambda file: file.write(json.dumps(document).encode()))


def _read(files: StateDir) -> dict[str, Count]:
    path = files.path / _FILE
    try:
        found = {owner: Count(**count) for owner, count in json.loads(path.read_text()).items()}
        if not all(type(each.left) is type(each.elements) is int and each.left >= 0 for each in found.values()):
            raise TypeError("counts are whole numbers")
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): it counts what has left this worker; put back a copy, or delete it and add "
            "what the log told last to what is counted from now on"
        ) from error
    return found
