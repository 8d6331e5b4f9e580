"""Writes docs/settings.md from the classes that read the settings: `python docs/write_settings.py`, in the repository.

A test fails while the page is not what this writes.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from coordinator.settings import Settings
from outerstep.cli import coordinator as coordinator_command
from outerstep.cli import worker as worker_command
from protocol.spec.run import RunSpec
from worker.settings import WorkerSettings

PAGE = Path(__file__).parent / "settings.md"

HEAD = """\
# Settings

Made by `docs/write_settings.py` from the classes that read them.

"""

RUN_SPEC = """\
## The run spec

A TOML file; `outerstep run create FILE` sends it to the coordinator, and it never changes afterwards, nor do the
defaults of what it leaves out, whatever a later version has. Unknown keys are refused. The least one:

```toml
name = "my-run"

[model]
preset = "tiny"

[sync]
rounds = 10
```

"""

DATABASE = """
The database and the data directory belong together: rows name files. So give `--database-url` at every start, and to
`outerstep migrate`, or never: a start that finds the files of runs and no database is refused. A backup is of both
([deployment.md](deployment.md#backup)).

- `sqlite:////var/lib/outerstep/run.db` is absolute, with four slashes; `sqlite:///run.db`, with three, is relative to
  the directory that the coordinator is started in. The directory has to be there.
- It must be on a disk of this machine: SQLite's WAL works on no network file system. In a container it must be on a
  volume, as `/data` is.
- To move a database, stop the coordinator and move `outerstep.db` with the files beside it whose names begin so. While
  the data directory has one and the URL names another, the coordinator does not start.
- One coordinator at a time: it holds `lock` in its data directory and, beside SQLite's file, a file whose name ends in
  `.lock`. A second one, with whatever data directory, ends at once and says so.
- Nothing but SQLite is there yet. A database in memory is refused, for a restart would lose it.
"""

TOKEN = """
A token on the command line is seen by everybody on the machine: `--token-file FILE` or `OUTERSTEP_TOKEN` in the
environment is better. The other commands that talk to a coordinator take `--url`, or `OUTERSTEP_URL`, and the token
likewise. `--ca FILE`, or `OUTERSTEP_CA` (which scripts with `DiLoCo.connect` heed too), is for a coordinator whose
certificate no public authority has signed.

A worker whose coordinator cannot be reached tries again for as long as it takes. Where that would not help, it ends
with exit code 3: before the first answer, a certificate that is not trusted, HTTPS to a port without it or the reverse,
and a server that is no coordinator.
"""

TOLD = """
### What a spec may make of the machine

A run's spec comes from the coordinator, so `outerstep worker`, `outerstep doctor` and `--no-sync` with a URL take
from it what their owner allows, before anything is loaded:

- `model.factory`, and an `inner.optimizer` of one's own, are code that is imported and run: `--allow-factory` has to
  have their very name.
- `data.source`, `data.tokenizer` and `model.pretrained` are places. A directory, a glob and each file that it finds
  have to lie below a `--data-root` once links and `..` are resolved; for the weights and the tokenizer it is the
  directory. An address (`https://`, `http://`, `s3://`, `gs://`, `az://`) has to begin with one, up to the end of a
  part. Of the Hugging Face hub (`hub:`, `hf://`, and names of tokenizers and models) `--data-root hub:ORG/NAME`
  allows a repository, `hub:ORG` an organisation, `hub:` all of it. What is fetched is fetched with this machine's own
  credentials, such as HF_TOKEN, and redirects are followed, so allow what may be read by them and learnt by those who
  see what is trained.
- Nothing is needed for presets, configurations and `python-stdlib`, for what `--data` names, and with `--spec`, which
  is the owner's own file. Code that comes with weights, data or a configuration (`trust_remote_code`, `auto_map`) is
  never run.

At a terminal, with one process, the worker asks once for all that is missing; anywhere else it ends with exit code 3
and the options to add. `outerstep run export` and `outerstep run evaluate` need `--allow-factory` as well; places
they read without it, as nothing of them leaves the machine. A script with `DiLoCo` brings model and data itself and
needs nothing.

### What is told of the machine

With `--tell all`: `host` (its name), `device` (with the GPU's or CPU's name), `threads`, `kernels` (compiled or
numpy), the versions of `torch` and `python`, `precision`, `processes` where there are several; and with the
measurements the MFU and the peak of memory. With `some`: `kernels`, `torch`, `python`, `precision` and `processes`.
With `nothing`: none of it. A worker without `--name` is called as its machine is, so less than `all` needs one.
Always told, as the run needs them: the name, the address that requests come from, the model's tensors, the training
set's digest and length (of private data the length alone), its tokenizer's name and digest, losses, speeds, phases,
and bytes and seconds of each round. Everybody who may read the run sees it, but for the address. A script says it by
`DiLoCo.connect(…, tell="some", name="…")`.
"""


def _limits(schema: dict[str, Any]) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if schema["type"] == "integer":
        low, above = (above + 1, None) if above is not None else (low, None)
        high, below = (below - 1, None) if below is not None else (high, None)
    bounds = [
        f"at least {_number(low)}" if low is not None else "",
        f"above {_number(above)}" if above is not None else "",
        f"at most {_number(high)}" if high is not None else "",
        f"below {_number(below)}" if below is not None else "",
    ]
    if low is not None and high is not None:
        return f", {_number(low)} to {_number(high)}"
    return "".join(f", {bound}" for bound in bounds if bound)


def _number(value: float) -> str:
    """Large powers of two, or one less, as such; others with separators."""
    for offset, suffix in ((0, ""), (1, " − 1")):
        power = int(value) + offset
        if power >= 1 << 20 and power & (power - 1) == 0:
            return f"2^{power.bit_length() - 1}{suffix}"
    return f"{value:,}"


def _type(schema: dict[str, Any]) -> str:
    """What is allowed, in words."""
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "object":
        return "table"
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}"
    name = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}[schema["type"]]
    if schema.get("format") == "path":
        name = "path"
    if "pattern" in schema:
        name += f" like `{schema['pattern'].replace('|', chr(92) + '|')}`"
    return name + _limits(schema)


def _default(schema: dict[str, Any], required: bool) -> str:
    if required:
        return "*required*"
    value = schema.get("default")
    if value is None:
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _meaning(schema: dict[str, Any]) -> str:
    if "description" not in schema:
        raise ValueError(f"a setting has no description: {schema}")
    text: str = schema["description"]
    return text.replace("|", "\\|")


def run_spec_section() -> str:
    """Every key of the run spec, one table per TOML table."""
    schema = RunSpec.model_json_schema()
    plain, tables = _section(schema, schema["$defs"], "")
    return RUN_SPEC + plain + "\n" + "\n".join(tables)


def _section(section: dict[str, Any], definitions: dict[str, Any], within: str) -> tuple[str, list[str]]:
    """Return the table of the section's own keys, and the TOML tables below it, whose names begin with `within`."""
    rows: list[str] = []
    tables: list[str] = []
    for key, field in section["properties"].items():
        choices = [field, *field.get("anyOf", [])]
        reference = next((choice["$ref"] for choice in choices if "$ref" in choice), None)
        if reference is None:
            rows.append(_row(f"`{key}`", field, key in section.get("required", [])))
            continue
        below = definitions[reference.rpartition("/")[2]]
        own, deeper = _section(below, definitions, f"{within}{key}.")
        tables += [f"### `[{within}{key}]`\n\n{below['description']}\n\n{own}", *deeper]
    return _table("key", rows), tables


def process_section(title: str, settings: type[BaseModel], flags: dict[str, str]) -> str:
    """Every setting of one process: its flag on the command line and, where it has one, its environment variable."""
    schema = settings.model_json_schema()
    prefix = settings.model_config.get("env_prefix")
    rows = []
    for name, field in schema["properties"].items():
        names = [f"`{flags[name]}`"] if name in flags else []
        if prefix is not None:
            names.append(f"`{prefix}{name.upper()}`")
        rows.append(_row(", ".join(names), field, name in schema.get("required", [])))
    return f"## {title}\n\n{settings.__doc__}\n\n{_table('setting', rows)}"


def _row(name: str, schema: dict[str, Any], required: bool) -> str:
    return f"| {name} | {_type(schema)} | {_default(schema, required)} | {_meaning(schema)} |\n"


def _table(first: str, rows: list[str]) -> str:
    return f"| {first} | allowed | default | meaning |\n| --- | --- | --- | --- |\n" + "".join(rows)


def page() -> str:
    return (
        HEAD
        + run_spec_section()
        + "\n"
        + process_section("The coordinator: `outerstep coordinator`", Settings, coordinator_command.FLAGS)
        + DATABASE
        + "\n"
        + process_section("A worker: `outerstep worker`", WorkerSettings, worker_command.FLAGS)
        + TOKEN
        + TOLD
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
