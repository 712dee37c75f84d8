"""The shipped policy loads, stays small, and its template takes whatever shape of history an agent sends."""

import json
import random
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from batching import Decoder, hidden_states
from chores import FAMILIES, draw
from make_policy import SANDBOX, Places, action, own_places, pi_prefix, quiz, transcript
from pi_words import RECORDED, Call, parse_call, run_tool, tool_turn, user_turn
from simulate import HERE, Sampler, advantages
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

pytestmark = pytest.mark.torch
POLICY = HERE / "tiny-policy"
USER = {"role": "user", "content": "Do it."}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.set_num_threads(1)
    return Qwen3ForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **more: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **more)


def test_the_policy_is_under_six_megabytes() -> None:
    assert sum(path.stat().st_size for path in POLICY.iterdir()) < 6_000_000


def test_the_policy_ends_its_turn_with_im_end(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "bash", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def test_arguments_as_text_and_as_object_read_the_same(tokenizer: PreTrainedTokenizerFast) -> None:
    wanted = '<tool_call>\n{"name": "bash", "arguments": {"command":"ls a"}}\n</tool_call><|im_end|>\n'
    for arguments in ('{"command":"ls a"}', {"command": "ls a"}):
        assert render(tokenizer, [USER, call(arguments)]).endswith(wanted)


@pytest.mark.parametrize("content", ["", None, [], [{"type": "text", "text": ""}]])
def test_empty_content_beside_a_call_reads_as_nothing(tokenizer: PreTrainedTokenizerFast, content: Any) -> None:
    assert "assistant\n<tool_call>" in render(tokenizer, [USER, call("{}") | {"content": content}])


def test_parts_join_and_several_results_share_one_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Do "}, {"type": "text", "text": "it."}]}
    results = [{"role": "tool", "content": text, "tool_call_id": "c"} for text in ("one", "two")]
    text = render(tokenizer, [parts, call("{}"), *results], add_generation_prompt=True)
    assert text.startswith("<|im_start|>user\nDo it.<|im_end|>\n")
    both = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    assert text.endswith(f"<|im_start|>user\n{both}<|im_start|>assistant\n")


def test_system_and_tools_may_each_be_absent(tokenizer: PreTrainedTokenizerFast) -> None:
    system = {"role": "developer", "content": "Be brief."}
    assert render(tokenizer, [USER]) == "<|im_start|>user\nDo it.<|im_end|>\n"
    assert render(tokenizer, [system, USER]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    only_tools = render(tokenizer, [USER], tools=RECORDED["tools"])
    assert only_tools.startswith("<|im_start|>system\n# Tools\n<tools>\n{")
    assert json.dumps(RECORDED["tools"][0], ensure_ascii=False) in only_tools


def test_the_template_renders_the_turns_that_the_warm_start_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    made = Call("write", {"path": "log_level", "content": "info"})
    arguments = json.dumps(made.arguments, separators=(",", ":"))
    messages = [USER, call(arguments), {"role": "tool", "content": "ok", "tool_call_id": "c"}]
    messages[1]["tool_calls"][0]["function"]["name"] = made.name
    wanted = user_turn("Do it.") + made.text() + "<|im_end|>" + tool_turn("ok")
    assert render(tokenizer, messages, add_generation_prompt=True) == wanted
    assert parse_call(made.text()) == made


def test_a_choice_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for family in FAMILIES.values():
        rows = [tokenizer(action(family.name, choice).text()).input_ids for choice in family.choices]
        assert len({len(row) for row in rows}) == 1
        assert sum(len(set(column)) > 1 for column in zip(*rows, strict=True)) == 1


def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(3)
    texts = ["naïve – 日本 \t\n\n  x=1", "2026-11-29", RECORDED["system"], json.dumps(RECORDED["tools"])]
    for family in FAMILIES.values():
        texts += ["".join(part.text for part in quiz(rng, family))]
        texts += ["".join(part.text for part in transcript(rng, draw(rng, family, "warm"), 0.5, 0.85))]
    for text in texts:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_the_decoder_agrees_with_a_plain_forward_pass(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    prefix = pi_prefix(tokenizer)
    rows = [tokenizer(user_turn(text)).input_ids for text in ("Do it.", "Please change log_level for the mail service.")]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    last = torch.tensor([len(row) - 1 for row in rows])
    decoder = Decoder(model, prefix, 2, 128)
    first = decoder.logits(torch.arange(2), ids, torch.zeros(2, dtype=torch.long), last)
    token = first.argmax(-1, keepdim=True)
    second = decoder.logits(torch.arange(2), token, last + 1, torch.zeros(2, dtype=torch.long))
    with torch.no_grad():
        shared = hidden_states(model, prefix, ids)
        for index, row in enumerate(rows):
            plain = model(torch.tensor([prefix + row + token[index].tolist()])).logits[0]
            torch.testing.assert_close(first[index], plain[-2], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(second[index], plain[-1], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(model.lm_head(shared[index, len(row) - 1]), plain[-2], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("places", [SANDBOX, own_places(random.Random(9))], ids=["sandbox", "own"])
def test_the_policy_calls_tools_and_stops(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, places: Places) -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    chores = [draw(rng, family, "warm") for family in FAMILIES.values() for _ in range(8)]
    rollouts = Sampler(tokenizer, pi_prefix(tokenizer, places))(model, chores)
    assert sum(rollout.finished for rollout in rollouts) >= 31
    assert sum(rollout.broken for rollout in rollouts) <= 2
    assert all(rollout.tool_calls for rollout in rollouts)


def test_emulated_tools_answer_as_the_recorded_pi_did() -> None:
    said = RECORDED["tool_results"]
    files = {"backup.conf": "what = mail\nevery = day\n", "inbox/note.txt": "A note from Anna.\n", "today/.keep": ""}
    edit = Call("edit", {"path": "backup.conf", "edits": [{"oldText": "day", "newText": "week"}]})
    move = Call("bash", {"command": "mv inbox/note.txt today"})
    asked = {
        "list": Call("bash", {"command": "ls"}),
        "read": Call("read", {"path": "backup.conf"}),
        "read missing": Call("read", {"path": "nothing.txt"}),
        "move": move,
        "move missing": move,
        "edit": edit,
        "edit missing": edit,
        "write": Call("write", {"path": "team.txt", "content": "money"}),
        "unknown tool": Call("find", {"path": "team.txt"}),
    }
    assert {label: run_tool(files, one) for label, one in asked.items()} == {label: said[label] for label in asked}
    assert files["today/note.txt"] == "A note from Anna.\n"
    assert "inbox/note.txt" not in files


def test_advantages_are_relative_to_the_group() -> None:
    assert advantages([1.0, 1.0]) == [0.0, 0.0]
    assert advantages([0.0, 1.0]) == pytest.approx([-1.0, 1.0])
