"""Conversations as token ids: what is trained on, how they are packed, and what is reported if they cannot be used."""

import json
from collections import Counter
from datetime import date
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast

from protocol.errors import SpecError
from protocol.spec.run import RunSpec, parse_spec
from protocol.spec.sections import DataSpec
from tests.support.conversations import conversation, write_conversations, write_rows
from tests.support.tokenizers import CHATML, CHATML_MARKED, TURN_END, write_chat_tokenizer, write_tokenizer
from worker.data.open_training_set import open_training_set
from worker.data.sources.rows import Rows, without_nulls
from worker.data.tokens.answers import CALL as NOT_RENDERED
from worker.data.tokens.answers import EMPTY, TrainOn
from worker.data.tokens.conversations import conversation_encoder, load_chat_template
from worker.data.tokens.index import read_index
from worker.data.tokens.marks import BEGINS, IDS, TRAINED
from worker.data.tokens.packing import pack
from worker.data.tokens.preparing import Recipe, encoding_of, prepare, recipe_of
from worker.data.tokens.rendering import renderer
from worker.data.tokens.tokenizer import Tokenizer, load_tokenizer
from worker.errors import DataError

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "who waits, 😀?"},
    {"role": "assistant", "content": "the worker waits é"},
    {"role": "user", "content": "and sends?"},
    {"role": "assistant", "content": "the delta 😀"},
]


def chat_tokenizer(tmp_path: Path, template: str | None = CHATML) -> Tokenizer:
    return load_tokenizer(str(write_chat_tokenizer(tmp_path / "tokenizer", template)))


def encoded(tokenizer: Tokenizer, example: Any, train_on: TrainOn = "assistant") -> np.ndarray:
    return conversation_encoder(tokenizer, load_chat_template(tokenizer), train_on)(json.dumps(example), Counter())


def trained_text(tokenizer: Tokenizer, ids: np.ndarray) -> list[str]:
    """The text of each run of tokens that are trained on."""
    fast = tokenizer.fast()
    runs: list[list[int]] = []
    marked = (ids & TRAINED) != 0
    for place in range(len(ids)):
        if marked[place]:
            if not (place and marked[place - 1]):
                runs.append([])
            runs[-1].append(int(ids[place] & IDS))
    return [fast.decode(run, skip_special_tokens=False) for run in runs]


# --- what is trained on -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ids_and_marks_are_those_of_apply_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = chat_tokenizer(tmp_path / "marked", CHATML_MARKED)
    ids = encoded(tokenizer, {"messages": TALK})
    by_transformers = AutoTokenizer.from_pretrained(tokenizer.name)
    expected: Any = by_transformers.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    assert (ids & IDS).tolist() == expected["input_ids"]
    assert ((ids & TRAINED) != 0).astype(int).tolist() == expected["assistant_masks"]
    assert np.flatnonzero(ids & BEGINS).tolist() == [0]
    without_marks = encoded(chat_tokenizer(tmp_path), {"messages": TALK})
    assert without_marks.tolist() == ids.tolist()
    assert trained_text(tokenizer, ids) == [f"the worker waits é{TURN_END}", f"the delta 😀{TURN_END}"]


def test_all_but_the_first_token_can_be_trained_on(tmp_path: Path) -> None:
    ids = encoded(chat_tokenizer(tmp_path), {"messages": TALK}, "all")
    assert ((ids & TRAINED) != 0).tolist() == [False] + [True] * (len(ids) - 1)


def test_a_prompt_and_its_completion(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, None)
    example = {"prompt": "who waits?", "completion": " the worker"}
    ids = encoded(tokenizer, example, "completion")
    assert trained_text(tokenizer, ids) == [f" the worker{TURN_END}"]  # it learns to end, as with TRL
    assert tokenizer.fast().decode((ids & IDS).tolist()) == "who waits? the worker"
    ended = encoded(tokenizer, {"prompt": "who waits?", "completion": f" the worker{TURN_END}"}, "completion")
    assert ended.tolist() == ids.tolist()


def test_an_end_that_the_tokenizer_adds_is_trained_on(tmp_path: Path) -> None:
    """It is nowhere in the text, and without it a model would never learn to stop."""
    from tokenizers.processors import TemplateProcessing

    write_chat_tokenizer(tmp_path / "tokenizer", None)
    file = tmp_path / "tokenizer" / "tokenizer.json"
    fast = Fast.from_file(str(file))
    end = fast.token_to_id(TURN_END)
    fast.post_processor = TemplateProcessing(single=f"$A {TURN_END}", special_tokens=[(TURN_END, end)])
    fast.save(str(file))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    ids = encoded(tokenizer, {"prompt": "who waits?", "completion": " the worker"}, "completion")
    assert trained_text(tokenizer, ids) == [f" the worker{TURN_END}"]
    assert [int(each) & IDS for each in ids].count(end or 0) == 1


def test_a_prompt_and_its_completion_of_messages(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    example = {"prompt": TALK[:2], "completion": TALK[2:]}
    (found,) = trained_text(tokenizer, encoded(tokenizer, example, "completion"))
    assert found.startswith("the worker waits é")
    assert "and sends?" in found
    assert found.endswith(f"the delta 😀{TURN_END}")


def test_tools_and_arguments_reach_the_template(tmp_path: Path) -> None:
    template = "{{ tools | tojson if tools else 'none' }}{{ mood }}{{ eos_token }}" + CHATML
    tokenizer = chat_tokenizer(tmp_path, template)
    example = {"messages": TALK, "tools": [{"name": "wait"}], "chat_template_kwargs": {"mood": "calm"}}
    text = tokenizer.fast().decode((encoded(tokenizer, example) & IDS).tolist(), skip_special_tokens=False)
    assert text.startswith(f'[{{"name": "wait"}}]calm{TURN_END}')


def test_a_template_for_tools_is_used_if_there_is_one(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    (tmp_path / "tokenizer" / "additional_chat_templates").mkdir()
    (tmp_path / "tokenizer" / "additional_chat_templates" / "tool_use.jinja").write_text("with tools " + CHATML)
    with_tools = encoded(tokenizer, {"messages": TALK, "tools": [{"name": "wait"}]})
    assert tokenizer.fast().decode((with_tools & IDS).tolist()).startswith("with tools")
    tokenizer.save(tmp_path / "copy")
    assert load_chat_template(load_tokenizer(str(tmp_path / "copy"))).templates.keys() == {"default", "tool_use"}  # type: ignore[union-attr]


def test_templates_in_the_configuration(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, None)
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    given = json.loads(config.read_text())
    config.write_text(json.dumps(given | {"chat_template": CHATML}))
    expected = encoded(tokenizer, {"messages": TALK})
    config.write_text(json.dumps(given | {"chat_template": [{"name": "default", "template": CHATML}]}))
    assert encoded(tokenizer, {"messages": TALK}).tolist() == expected.tolist()


FORGETFUL = (  # renders an earlier answer without its thoughts once another message follows, as Qwen 3 does
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{{ message.content if loop.last else message.content.split('</think>') | last }}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


THINKING = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "hm</think>yes"}]


def test_answers_that_the_template_changes_later_are_trained_on_as_they_are_generated(tmp_path: Path) -> None:
    """Each in a part of its own, up to which nothing differs from what a model sees at inference."""
    tokenizer = chat_tokenizer(tmp_path, FORGETFUL)
    once = encoded(tokenizer, {"messages": THINKING})
    assert trained_text(tokenizer, once) == [f"hm</think>yes{TURN_END}"]
    twice = encoded(tokenizer, {"messages": THINKING * 2})
    first, second = np.split(twice, np.flatnonzero(twice & BEGINS)[1:])
    assert first.tolist() == once.tolist()
    text = tokenizer.fast().decode((second & IDS).tolist(), skip_special_tokens=False)
    assert text.count("hm</think>") == 1
    assert trained_text(tokenizer, second) == [f"hm</think>yes{TURN_END}"]
    assert len(encoded(tokenizer, {"messages": THINKING * 2}, "all"))


@pytest.mark.parametrize(
    ("template", "example", "train_on", "message"),
    [
        (
            FORGETFUL,
            {"prompt": THINKING, "completion": THINKING},
            "completion",
            r"tokenizer'.* so the completion cannot be found exactly: set train_on = \"all\"$",
        ),
        (
            "{{ raise_exception('roles must alternate') if messages[0].role == 'assistant' }}" + CHATML,
            {"messages": TALK[2:3]},
            "assistant",
            r"rejects the conversation .*the worker waits.*roles must alternate",
        ),
        (None, {"messages": TALK}, "assistant", "no chat template; put its chat_template.jinja into"),
    ],
)
def test_what_a_template_cannot_render_is_rejected_by_name(
    tmp_path: Path, template: str | None, example: Any, train_on: TrainOn, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        encoded(chat_tokenizer(tmp_path, template), example, train_on)


def test_an_answer_without_an_end_learns_to_end(tmp_path: Path) -> None:
    """GLM ends an answer with the token that begins the next message; a template may also have none at all."""
    glm = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    tokenizer = chat_tokenizer(tmp_path / "glm", glm)
    found = trained_text(tokenizer, encoded(tokenizer, {"messages": TALK}))
    assert found == ["the worker waits é<|im_start|>", "the delta 😀<|im_start|>"]
    tokenizer = chat_tokenizer(
        tmp_path / "none", "{% for message in messages %}{{ '\\n' + message.content }}{% endfor %}"
    )
    ids = encoded(tokenizer, {"messages": TALK})
    assert trained_text(tokenizer, ids) == [f"\nthe worker waits é{TURN_END}", f"\nthe delta 😀{TURN_END}"]
    assert len(np.flatnonzero(ids & BEGINS)) == 2


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["plain", "marked"])
def test_answers_of_weight_0_and_empty_ones_are_not_trained_on(tmp_path: Path, template: str) -> None:
    tokenizer = chat_tokenizer(tmp_path, template)
    talk = [*TALK[:2], TALK[2] | {"weight": 0}, TALK[3], TALK[4] | {"weight": 1}, TALK[3], TALK[2] | {"content": " "}]
    encode = conversation_encoder(tokenizer, load_chat_template(tokenizer), "assistant")
    ignored = Counter[str]()
    ids = encode(json.dumps({"messages": talk}), ignored)
    assert trained_text(tokenizer, ids) == [f"the delta 😀{TURN_END}"]
    assert ignored == {EMPTY: 1}
    everything = encoded(tokenizer, {"messages": talk}, "all")
    assert "the worker waits é" not in "".join(trained_text(tokenizer, everything))


CALL: dict[str, Any] = {"role": "assistant", "tool_calls": [{"function": {"name": "wait", "arguments": {"s": 1}}}]}
CALLING = (  # as DeepSeek's template: it asks whether the content is null, and puts the arguments into text
    "{% for message in messages %}{% if message.content is none %}{{ '<|im_start|>assistant\n<call>' + "
    "message.tool_calls[0].function.arguments + '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + message.role + '\n' + "
    "message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_tool_calls_reach_the_template_with_a_null_content(tmp_path: Path) -> None:
    example = example_of({"messages": [TALK[1], CALL | {"content": None}, {"role": "tool", "content": "1"}, TALK[4]]})
    tokenizer = chat_tokenizer(tmp_path, CALLING)
    found = trained_text(tokenizer, encoded(tokenizer, example))
    assert found == [f'<call>{{"s": 1}}{TURN_END}', f"the delta 😀{TURN_END}"]


def test_tool_calls_that_the_template_does_not_render_are_not_trained_on(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    encode = conversation_encoder(tokenizer, load_chat_template(tokenizer), "assistant")
    ignored = Counter[str]()
    ids = encode(json.dumps({"messages": [TALK[1], CALL, TALK[3], TALK[4]]}), ignored)
    assert trained_text(tokenizer, ids) == [f"the delta 😀{TURN_END}"]
    assert ignored == {NOT_RENDERED: 1}


def test_content_in_parts_reaches_the_template_as_it_takes_it(tmp_path: Path) -> None:
    parts = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in TALK]
    in_parts = CHATML.replace("message.content", "message.content[0]['text']")
    expected = encoded(chat_tokenizer(tmp_path), {"messages": TALK}).tolist()
    assert encoded(chat_tokenizer(tmp_path), {"messages": parts}).tolist() == expected
    for talk in (TALK, parts):
        assert encoded(chat_tokenizer(tmp_path, in_parts), {"messages": talk}).tolist() == expected


def test_the_date_of_a_template_is_the_given_one(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "{{ strftime_now('%d %b %Y') }}" + CHATML)
    template = load_chat_template(tokenizer, date(2024, 2, 29))
    ids = conversation_encoder(tokenizer, template, "assistant")(json.dumps({"messages": TALK}), Counter())
    assert tokenizer.fast().decode((ids & IDS).tolist()).startswith("29 Feb 2024")


def test_the_date_changes_only_the_sets_of_templates_that_show_it(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    one, other = (encoding_of(DataSpec(format="chat", date=date(2024, 1, d)), tokenizer) for d in (1, 2))
    assert one.identity() == other.identity()


@pytest.mark.slow
@pytest.mark.covers("security:template-bomb")
@pytest.mark.parametrize(
    ("bomb", "message"),
    [
        ("{{ 'b' * 3000000000 }}", "more than 1024 MiB"),
        ("{{ 'b' * 30000000 }}", "30000"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 0 s of CPU"),
    ],
)
def test_a_template_that_takes_too_much_ends(
    tmp_path: Path, bomb: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "CPU" in message:
        monkeypatch.setattr("worker.data.tokens.rendering.CPU_S", 0)
    with pytest.raises(DataError, match=f"tokenizer' .*{message}.*do not use it"):
        encoded(chat_tokenizer(tmp_path, bomb + CHATML), {"messages": TALK})
    template = load_chat_template(load_tokenizer(str(tmp_path / "tokenizer")))
    assert template is not None
    with pytest.raises(DataError, match=message):
        template.prompt(renderer(), TALK)  # as `outerstep run chat` does
    monkeypatch.undo()
    assert len(encoded(chat_tokenizer(tmp_path), {"messages": TALK})), "others can still be rendered"


# --- rows -----------------------------------------------------------------------------------------------------------


def example_of(row: Any, row_format: Any = "chat") -> Any:
    (piece,) = Rows(0.0, row_format).pieces(row, "here")
    if piece.fault is not None:
        raise DataError(piece.fault)
    return json.loads(piece.text)


def test_both_conventions_of_messages() -> None:
    assert example_of({"messages": TALK, "id": 3}) == {"messages": TALK}
    share_gpt = [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "you"}]
    roles = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "you"}]
    assert example_of({"conversations": share_gpt}) == {"messages": roles}
    for bot in ("Assistant", "bot", "GPT", "model"):
        named = [{"role": "Human", "content": "who?"}, {"role": bot, "content": "you"}]
        assert example_of({"messages": named}) == {"messages": roles}


def test_what_belongs_to_a_conversation() -> None:
    tools = [{"type": "function", "function": {"name": "wait"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "wait", "arguments": {}}}]}
    found = example_of({"messages": [*TALK[:2], call], "tools": json.dumps(tools), "chat_template_kwargs": {}})
    assert found == {
        "messages": [*TALK[:2], {key: value for key, value in call.items() if value is not None}],
        "tools": tools,
    }
    assert without_nulls({"a": [{"b": None, "c": [None, 1]}]}) == {"a": [{"c": [None, 1]}]}


@pytest.mark.parametrize(
    ("row_format", "row", "message"),
    [
        ("chat", {"text": "x"}, r"needs \"messages\", found 'text'$"),
        ("chat", {"prompt": "x", "completion": "y"}, 'use the format "completion"'),
        ("completion", {"messages": TALK}, 'use the format "chat"'),
        ("chat", [], "expected an object with a conversation, found an empty list"),
        ("chat", {"messages": "hello"}, '"messages" is text, not a list of messages'),
        ("chat", {"messages": []}, "is an empty list"),
        ("chat", {"messages": [TALK[0], 7]}, r"messages\[1\] is int, not an object"),
        ("chat", {"messages": [{"content": "x"}]}, r"messages\[0\] has no \"role\""),
        ("chat", {"messages": [{"role": "user"}]}, r"messages\[0\] has no \"content\""),
        ("chat", {"messages": [{"role": "user", "content": 3}]}, r"messages\[0\] has no \"content\""),
        ("chat", {"messages": TALK, "tools": "{"}, '"tools" is not valid JSON'),
        ("chat", {"messages": TALK, "tools": {"name": "wait"}}, '"tools" is an object, not an empty list'),
        ("chat", {"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ("chat", {"messages": [TALK[1] | {"content": [{"type": "image_url"}]}]}, r"messages\[0\].*type 'image_url'"),
        ("chat", {"messages": [TALK[2] | {"weight": 0.5}]}, r"weight of its messages\[0\] is 0.5, not 0 or 1"),
        ("completion", {"prompt": "x", "completion": TALK}, "must be texts, or both lists"),
    ],
)
def test_rows_that_are_no_conversation(row_format: Any, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        example_of(row, row_format)


def test_rows_that_cannot_be_used_are_skipped_counted_and_shown(tmp_path: Path) -> None:
    strange = [{"role": "user", "content": "who?"}, {"role": "narrator", "content": "the worker"}]
    file = write_conversations(tmp_path / "talk.jsonl", 20)
    good = prepare(recipe(file, tmp_path, "holdout = 0.0"), tmp_path / "good", processes=1)
    lines = file.read_text().splitlines()
    lines[3:3] = ['{"messages": [', json.dumps({"messages": [{"role": "user", "content": 7}]})]
    file.write_text("\n".join([*lines, json.dumps({"messages": strange})]))
    index = prepare(recipe(file, tmp_path, "holdout = 0.0"), tmp_path / "set", processes=1)
    assert index.digest() == good.digest()
    found = index.conversations
    assert found is not None
    assert found.skipped == 3
    assert found.faults[0].startswith(f"{file}, line 4: not valid JSON")
    assert 'line 5: its messages[0] has no "content"' in found.faults[1]
    assert "line 23: " in found.faults[2]
    assert "narrator" in found.faults[2]
    assert any(sentence.startswith("3 rows were skipped: ") for sentence in found.left_out())


def test_a_set_of_which_most_rows_cannot_be_used_is_rejected(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "talk.jsonl", [{"messages": TALK}, {"messages": []}, {"text": "x"}])
    with pytest.raises(DataError, match=r"2 of 3 rows cannot be used; the first is .*talk.jsonl, line 2"):
        prepare(recipe(file, tmp_path), tmp_path / "set", processes=1)


def test_what_a_template_that_rewrites_costs_is_shown(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "talk.jsonl", [{"messages": THINKING * 3}] * 4)
    tokenizer = chat_tokenizer(tmp_path, FORGETFUL)
    made_of = recipe_of(spec(file, tmp_path, "holdout = 0.0").data, tokenizer, shard_tokens=1000)
    index = prepare(made_of, tmp_path / "set", processes=1)
    found = index.conversations
    assert found is not None
    assert found.split == 4
    lengths = [len(encoded(tokenizer, {"messages": THINKING * n})) for n in (1, 2, 3)]
    assert found.repeated == 4 * (lengths[1])
    assert sum(shard.documents or 0 for shard in index.training) == 4
    assert "repeat" in found.left_out()[0]


def test_conversations_in_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows: list[dict[str, Any]] = [{"id": n, "messages": conversation(n), "tools": None} for n in range(20)]
    rows[3]["messages"][1]["tool_calls"] = [{"name": "wait"}]  # null in all other messages, and not rendered
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "talk.parquet")
    lines = write_rows(tmp_path / "talk.jsonl", rows)
    indexes = [
        prepare(recipe(file, tmp_path), tmp_path / f"set{file.suffix}", processes=1)
        for file in (tmp_path / "talk.parquet", lines)
    ]
    assert indexes[0].digest() == indexes[1].digest()


# --- packing --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.lists(st.integers(1, 30), max_size=60))
def test_packing_places_every_conversation_once_and_wastes_little(lengths: list[int]) -> None:
    sequences = pack(lengths, 30)
    assert sorted(chain.from_iterable(sequences)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in sequence) <= 30 for sequence in sequences)
    assert 9 * len(sequences) <= 11 * len(lengths) + 6
    assert sum(sum(lengths[i] for i in sequence) <= 15 for sequence in sequences) <= 1, "two could share one"


# --- token sets -----------------------------------------------------------------------------------------------------


def spec(source: Path, tmp_path: Path | None, data: str = "", *, length: int = 100, batch: int = 2) -> RunSpec:
    named = "" if tmp_path is None else f"tokenizer = {str(tmp_path / 'tokenizer')!r}\n"
    return parse_spec(
        f'name = "r"\nmodel.preset = "tiny"\nmodel.vocab_size = 300\nsync.rounds = 1\ninner.batch_size = {batch}\n'
        f"[data]\nsource = {str(source)!r}\n{named}format = 'chat'\nsequence_length = {length}\n{data}"
    )


def recipe(source: Path, tmp_path: Path, data: str = "", *, length: int = 100) -> Recipe:
    tokenizer = chat_tokenizer(tmp_path)
    return recipe_of(spec(source, tmp_path, data, length=length).data, tokenizer, shard_tokens=1000)


def conversations_in(directory: Path, held_out: bool) -> list[list[int]]:
    """The ids of each conversation in the shards, without padding, which follows the last one of a sequence."""
    index, found = read_index(directory / "index.json"), []
    for shard in index.held_out if held_out else index.training:
        for row in np.fromfile(directory / shard.file, "<u4").reshape(-1, index.row_tokens):
            starts = [*np.flatnonzero(row & BEGINS).tolist(), len(row)]
            found += [row[start:stop].tolist() for start, stop in pairwise(starts)]
    return found


def test_every_conversation_is_there_once(tmp_path: Path) -> None:
    source = write_conversations(tmp_path / "talk.jsonl")
    index = prepare(recipe(source, tmp_path, "holdout = 0.2", length=160), tmp_path / "set", processes=1)
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    encode = conversation_encoder(tokenizer, load_chat_template(tokenizer), "assistant")
    talks = [{"messages": conversation(number, number % 3 + 1)} for number in range(60)]
    wanted = [encode(json.dumps(each), Counter()) for each in talks]
    found = [each for part in (False, True) for each in conversations_in(tmp_path / "set", part)]
    pad = load_tokenizer(str(tmp_path / "tokenizer")).pad

    def without_padding(ids: list[int]) -> tuple[int, ...]:
        while ids and ids[-1] == pad:
            ids = ids[:-1]
        return tuple(ids)

    assert sorted(map(without_padding, found)) == sorted(tuple(ids.tolist()) for ids in wanted)
    assert index.format == 2
    assert len(index.training) > 1
    assert all(shard.tokens % 161 == 0 for shard in index.shards)
    counted = [int(np.count_nonzero(ids & TRAINED)) for ids in wanted]
    assert sum(shard.trained or 0 for shard in index.shards) == sum(counted)
    assert sum(shard.documents or 0 for shard in index.shards) == 60
    assert index.conversations is not None
    assert (index.conversations.longest, index.conversations.truncated) == (max(map(len, wanted)), 0)
    used = sum(map(len, wanted)) / sum(shard.tokens for shard in index.shards)
    assert used > 0.8, "one conversation in each would use a third"


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    question = {"role": "user", "content": "who? " * 40}
    rows = [
        {"messages": [TALK[1], {"role": "assistant", "content": "the worker waits " * 40}]},  # truncated
        {"messages": [question, TALK[2]]},  # its answer is beyond the end
        {"messages": [TALK[1]]},  # nobody answers
        {"messages": TALK},
    ]
    source = write_rows(tmp_path / "talk.jsonl", rows)
    index = prepare(recipe(source, tmp_path, "holdout = 0.0"), tmp_path / "set", processes=1)
    found = index.conversations
    assert found is not None
    assert found.truncated == 1
    assert found.dropped == {"nothing to train on": 1, "nothing to train on in the first 101 tokens": 1}
    assert found.longest > 101
    assert sum(shard.documents or 0 for shard in index.training) == 2


def test_nothing_to_train_on(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "talk.jsonl", [{"messages": TALK[:2]}])
    with pytest.raises(DataError, match="no text to train on; 1 conversations have nothing to train on"):
        prepare(recipe(source, tmp_path), tmp_path / "set", processes=1)


def test_another_template_is_another_set(tmp_path: Path) -> None:
    source = write_conversations(tmp_path / "talk.jsonl")
    write_chat_tokenizer(tmp_path / "tokenizer")
    before = open_training_set(spec(source, tmp_path)).summary
    write_chat_tokenizer(tmp_path / "tokenizer", CHATML.replace("\\n", " "))
    assert open_training_set(spec(source, tmp_path)).summary.digest != before.digest


def test_units_have_whole_sequences_with_marks(tmp_path: Path) -> None:
    source = write_conversations(tmp_path / "talk.jsonl")
    write_chat_tokenizer(tmp_path / "tokenizer")
    data = open_training_set(spec(source, tmp_path, "holdout = 0.2"))
    units = [data.unit(number) for number in range(data.units_per_epoch)]
    assert all(unit.shape == (2, 101) for unit in units)
    assert all((unit[:, 0] & BEGINS).all() for unit in units)
    assert all(((unit & TRAINED) != 0).any(dim=1).all() for unit in units)
    held_out = list(data.held_out_batches(10**6))
    assert data.held_out_tokens == sum(int(((batch & TRAINED) != 0).sum()) for batch in held_out)
    assert data.bytes_per_token is None


def test_without_packing_each_has_one_and_batches_are_short(tmp_path: Path) -> None:
    source = write_conversations(tmp_path / "talk.jsonl")
    write_chat_tokenizer(tmp_path / "tokenizer")
    data = open_training_set(spec(source, tmp_path, "packing = false\nholdout = 0.0", length=400))
    assert data.units_per_epoch == 30
    for number in range(30):
        unit = data.unit(number)
        assert ((unit & BEGINS) != 0).sum(dim=1).tolist() == [1, 1]
        last = int(((unit & TRAINED) != 0).any(dim=0).nonzero().max())
        assert last < unit.shape[1] <= last + 65
        assert (unit.shape[1] - 1) % 64 == 0


def test_too_few_conversations_for_a_batch(tmp_path: Path) -> None:
    write_chat_tokenizer(tmp_path / "tokenizer")
    source = write_conversations(tmp_path / "talk.jsonl", 3)
    with pytest.raises(
        DataError, match=r"sequences of conversations to train on, too few for one work unit of 64: lower"
    ):
        open_training_set(spec(source, tmp_path, batch=64))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"length": 50}, r"sequence_length = 100, but data.sequence_length is 50: set data.sequence_length = 100"),
        ({"data": "train_on = 'all'"}, r'train_on = "assistant", but data.train_on is "all"'),
        ({"data": "packing = false"}, r"packing = true, but data.packing is false"),
    ],
)
def test_a_set_that_was_prepared_otherwise(tmp_path: Path, changed: Any, message: str) -> None:
    source = write_conversations(tmp_path / "talk.jsonl")
    prepare(recipe(source, tmp_path), tmp_path / "set", processes=1)
    assert open_training_set(spec(tmp_path / "set", None)).units_per_epoch > 5
    with pytest.raises(DataError, match=message):
        open_training_set(spec(tmp_path / "set", None, **changed))


def test_sets_of_text_and_of_conversations_are_not_confused(tmp_path: Path) -> None:
    source = write_conversations(tmp_path / "talk.jsonl")
    prepare(recipe(source, tmp_path), tmp_path / "set", processes=1)
    text = parse_spec(f'name="r"\nmodel.preset="tiny"\nsync.rounds=1\n[data]\nsource={str(tmp_path / "set")!r}')
    with pytest.raises(DataError, match=r'is a token set of conversations: set data.format = "chat"'):
        open_training_set(text)
    lines = write_rows(tmp_path / "text.jsonl", [{"text": "the worker waits"}] * 200)
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "plain")))
    prepare(recipe_of(text.data.model_copy(update={"source": str(lines)}), tokenizer), tmp_path / "text", processes=1)
    with pytest.raises(DataError, match="is a token set of text"):
        open_training_set(spec(tmp_path / "text", None))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"format": 1}, "format 1 has no conversations"),
        ({"conversations": None}, "format 2 needs conversations"),
        ({"dtype": "uint16"}, "format 2 has ids below"),
        ({"shard": {"tokens": 100}}, "100 tokens, no multiple of the 101 of a sequence"),
        ({"shard": {"trained": 0}}, "trains on 0 of"),
        ({"shard": {"trained": None}}, "trains on None of"),
    ],
)
def test_an_index_that_contradicts_itself(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    source = write_conversations(tmp_path / "talk.jsonl")
    prepare(recipe(source, tmp_path), tmp_path / "set", processes=1)
    index = json.loads((tmp_path / "set" / "index.json").read_text())
    index["training"][0].update(edit.pop("shard", {}))
    (tmp_path / "set" / "index.json").write_text(json.dumps(index | edit))
    with pytest.raises(DataError, match=message):
        read_index(tmp_path / "set" / "index.json")


def test_text_files_are_no_conversations(tmp_path: Path) -> None:
    (tmp_path / "talk.txt").write_text("user: who waits?")
    write_chat_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(DataError, match="talk.txt is text, but conversations are read from .jsonl"):
        open_training_set(spec(tmp_path / "talk.txt", tmp_path))
    (tmp_path / "talk.bin").write_bytes(bytes(100))
    with pytest.raises(DataError, match="talk.bin is tokens, but conversations are read from .jsonl"):
        open_training_set(spec(tmp_path / "talk.bin", tmp_path))
    with pytest.raises(DataError, match=r'data.format = "chat" needs data.tokenizer'):
        open_training_set(spec(write_conversations(tmp_path / "talk.jsonl"), None))


# --- the spec -------------------------------------------------------------------------------------------------------

SPEC = 'name = "r"\nmodel.preset = "tiny"\nsync.rounds = 1\n'


def test_defaults_by_format() -> None:
    assert parse_spec(SPEC).data.sequence_length == 256
    chat = parse_spec(SPEC + 'data.format = "chat"').data
    assert (chat.sequence_length, chat.trains_on, chat.packing) == (1024, "assistant", True)
    completion = parse_spec(SPEC + 'data.format = "completion"\ndata.sequence_length = 300').data
    assert (completion.sequence_length, completion.trains_on) == (300, "completion")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('train_on = "all"', r'train_on = "all" does not exist for format = "text": leave it out'),
        ('format = "chat"\ntrain_on = "completion"', 'use "assistant" or "all"'),
        ("packing = true", 'data.packing does nothing with format = "text"'),
        ('format = "chat"\ncolumn = "messages"', 'data.column does nothing with format = "chat"'),
        ('format = "chat"\ntokenizer = "bytes"', 'not "bytes"'),
        ('format = "chat"\nsource = "custom"', 'does nothing with source = "custom"'),
    ],
)
def test_settings_that_do_not_fit_together(data: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse_spec(f"{SPEC}[data]\n{data}")
