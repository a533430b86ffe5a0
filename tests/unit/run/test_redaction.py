"""Secrets in settings, and in texts within settings, do not leave the machine."""

from __future__ import annotations

import json

import pytest

from rlt_lightning.run.redaction import redact


@pytest.mark.parametrize(
    "text",
    [
        '{"api_key": "geheim123"}',
        '{"a": 1, "api_key" : "geheim123", "b": "kept"}',
        '{"password": "a\\"geheim123"}',
        "{'hf_token': 'geheim123'}",
        json.dumps({"inner": json.dumps({"client_secret": "geheim123", "b": "kept"})}),
        json.dumps(json.dumps(json.dumps({"api-key": "geheim123"}))),
        "-----BEGIN PRIVATE KEY-----\ngeheim123\n-----END PRIVATE KEY-----",
        "a -----BEGIN RSA PRIVATE KEY-----\\ngeheim123\\n-----END RSA PRIVATE KEY----- kept",
        "-----BEGIN OPENSSH PRIVATE KEY-----\ngeheim123\n",
    ],
)
def test_secrets_inside_of_a_text_are_hidden(text: str) -> None:
    hidden = redact({"note": text})["note"]
    assert "geheim" not in hidden
    assert "***" in hidden
    assert hidden.count("kept") == text.count("kept")
    public = (
        '{"key": "column", "keyboard": "kept", "question": "What is \\"x\\"?"}, -----BEGIN CERTIFICATE-----'
    )
    assert redact(public) == public


@pytest.mark.parametrize("piece", ["a", "-", "a-", "--a", "key", "-key", "'a", "://a", '\\"a\\":\\"'])
def test_long_texts_take_no_quadratic_time(piece: str) -> None:
    text = piece * (200_000 // len(piece))  # else half an hour
    assert redact(f"{text}; hf_token=geheim123 {text}") == f"{text}; hf_token=*** {text}"
