"""What is likely a secret is hidden in data and texts, and is not saved."""

import attrs
import pytest

from composer.core import Algorithm
from composer.core.base import rebuild_algorithm
from composer.core.saving.components import settings_to_save
from composer.core.saving.secrets import hide_secrets, is_secret_name, without_secret_urls

SECRET = "auth key keys api_key X-Api-Key accessToken hf_token pwd jwt bearer header extraHeaders webhook hook secrets"
ACRONYMS = "HFToken SSHKey DBPass token2 API_KEY_2 apiKey1"
JOINED = "hftoken dbpass GITHUB_PAT sig connection_string connectionString passcode userpass sas_token DB_PW"
PLAIN = "author monkey keyboard num_layers tokenizer input_key boxes_key eos_token load_ignore_keys hooked passes"
OTHERS = "pattern path patience compass bypass significance sign sigma pin_memory dbpath connection"


@pytest.mark.parametrize("name", [*SECRET.split(), *ACRONYMS.split(), *JOINED.split()])
def test_names_of_secrets(name):
    """Words within a name decide, in snake case, camel case, behind acronyms, before digits or with hyphens."""
    assert is_secret_name(name)


@pytest.mark.parametrize("name", [*PLAIN.split(), *OTHERS.split()])
def test_other_names(name):
    """Parts of words, keys of a batch and special tokens are no secrets."""
    assert not is_secret_name(name)


def test_a_user_is_hidden_everywhere():
    """Errors of file systems repeat the user without the URL."""
    text = without_secret_urls("s3://me:pass@host/run: Invalid bucket name 'me:pass@host'")

    assert text == "s3://(hidden)@host/run: Invalid bucket name '(hidden)@host'"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("export HF_TOKEN=s3cr3t python train.py", "export HF_TOKEN=(hidden) python train.py"),
        ("--rate 0.1 a --api-key s3cr3t", "--rate 0.1 a --api-key (hidden)"),
        ('{"api_key": "s3 cr3t", "rate": 1}', '{"api_key": (hidden), "rate": 1}'),
        ("{'token': 's3cr3t'}", "{'token': (hidden)}"),
        ("run with bearer s3cr3t", "run with bearer (hidden)"),
        ('{"run": "a.py --token s3cr3t"}', '{"run": "a.py --token (hidden)'),
        ("clone with ghp_0123456789abcdefghij now", "clone with (hidden) now"),
        ("hf_abcdefghijklmnopqrst", "(hidden)"),
        ("sk-proj-abcdefghijklmnop, task-specific-head", "(hidden), task-specific-head"),
        ("Server=x;Password=s3cr3t;User=me", "Server=x;Password=(hidden);User=me"),
        ("the token of a run: none", "the token of a run: none"),
    ],
)
def test_pairs_within_a_text(text, expected):
    """Other words before a pair do not keep its value, and quotes belong to it."""
    assert hide_secrets(text) == expected


def test_other_values_are_kept():
    """Numbers, None and empty strings are no secrets; the kinds of containers are kept."""
    assert hide_secrets({"token": (1, None, ""), "keys": [True]}) == {"token": (1, None, ""), "keys": [True]}


@attrs.define(eq=False)
class Fetch(Algorithm):
    """An algorithm with a secret among its settings."""

    password: str = ""
    input_key: str = "image"

    def apply(self, event, state, logger):
        raise AssertionError


def test_settings_that_are_saved():
    """A secret is not saved, and constructing the algorithm again names the setting to pass."""
    data = settings_to_save(Fetch("s3cr3t"))

    assert data == {"password": {"unsaved": "(hidden)"}, "input_key": "image"}
    described = settings_to_save(Fetch(("s3cr3t", print)))["password"]
    assert described == {"unsaved": "('(hidden)', function builtins.print)"}
    with pytest.raises(ValueError, match=r"setting password was not data.*algorithms=\[Fetch\(password=\.\.\.\)\]"):
        rebuild_algorithm({"name": "Fetch", "settings": data})
    assert rebuild_algorithm({"name": "Fetch", "settings": settings_to_save(Fetch())}).input_key == "image"
