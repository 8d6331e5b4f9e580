"""Settings that the environment may give."""

import difflib
import os
from collections.abc import Collection
from typing import Self

from pydantic import model_validator
from pydantic_settings import BaseSettings

_SIMILAR = 0.82  # of difflib: a letter or two apart


class EnvironmentSettings(BaseSettings):
    """Settings that the environment may give, each by a variable: the prefix and its name. A variable that looks like a
    misspelt one is refused, since it would have no effect. Others may begin with the prefix as well, such as those that
    Kubernetes sets for its services."""

    @model_validator(mode="after")
    def _no_misspelt_variable(self) -> Self:
        prefix, names = self.model_config["env_prefix"], self.names()
        for variable in os.environ:
            name = variable.removeprefix(prefix).lower()
            if not variable.startswith(prefix) or name in names:
                continue
            for meant in difflib.get_close_matches(name, names, 1, _SIMILAR):
                raise ValueError(
                    f"the environment has {variable}, which is no setting: did you mean {prefix}{meant.upper()}?"
                )
        return self

    @classmethod
    def names(cls) -> Collection[str]:
        """Return the names of all settings with this prefix."""
        return cls.model_fields
