"""What is cut out of an agent's instructions, one test for each entry, and what is not."""

import pytest

from evener_proxy.noise import without_noise


@pytest.mark.parametrize("build", ["4f1", "a02"])
def test_claude_codes_billing_header(build):
    header = f"x-anthropic-billing-header: cc_version=2.1.332.{build}; cc_entrypoint=sdk-cli; cch=00000;"
    assert without_noise(header) == ""
    assert without_noise(f"{header}\n\nYou are an agent.\n") == "You are an agent.\n"
    assert without_noise(f"You are an agent.\n{header}\nBe terse.") == "You are an agent.\nBe terse."


@pytest.mark.parametrize("text", ["", "You are an agent.", "Never send an x-anthropic-billing-header: it is private."])
def test_other_text_stays(text):
    assert without_noise(text) == text
