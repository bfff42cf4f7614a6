"""Hide what is likely a secret in what a run logs, saves or reports: by names, and within URLs and texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"

_SECRET = re.compile(
    r"(^|_)(auth|keys?|tokens?|pwd|pass|pat|sig|sas|hooks?|headers?|dsn|conn(ection)?_?str(ing)?)\d*(_|$)"
    r"|(api|access|auth|private|secret|session|hf|hub|github|gitlab|wandb|slack|bot)_?(key|token|pass|pat)"
    r"|(db|user|root|admin|smtp|mysql|postgres|pg|redis|mongo|my|ssh)_?(pass|pwd|pw)(_|$)"
    r"|secret|passw|passphrase|passcode|webhook|credential|authori[sz]|authent|bearer|jwt|cookie|signature"
)
# The places of a batch, patterns of names, and special tokens of tokenizers.
_NO_SECRET = re.compile(
    r"(^|_)(inputs?|targets?|labels?|reference|masks?|box(es)?|keypoints?|index|images?|batch|ignore|include|exclude|memory)_keys?$"
    r"|(^|_)(eos|bos|pad|unk|sep|cls|mask|start|end|stop|special|additional)\w*_tokens?$"
)
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|\W+")  # X-Api-Key, accessToken, HFToken
_USER = re.compile(r"(?<=://)(?:[^/\s@]*:\S*|[^/\s]*)@")
_QUERY = re.compile(r"(://[^\s?#]*[?#])[^\s'\"]+")
_HOOK = re.compile(r"(://[^\s/]*hook[^\s/]*/|://\S*/\w*hooks?/)[^\s'\"]+", re.IGNORECASE)
_NAME = re.compile(r"(?<![\w-])(?:[\w-]+[\"']?\s*[=:]\s*|--[\w-]+\s+|bearer\s+)(?=\S)", re.IGNORECASE)
_TOKEN = re.compile(  # of hubs, trackers and clouds, by the beginnings that they document
    r"(?<![\w-])(?:hf_|gh[opsur]_|github_pat_|glpat-|sk-|sk_live_|rk_live_|xox[abprs]-|npm_|pypi-|AKIA|ASIA|AIza|eyJ[\w-]+\.eyJ)"
    r"[\w.-]{12,}"
)
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|(?:(?:bearer|basic)\s+)?[^\s,;&]+", re.IGNORECASE)


def is_secret_name(name: object) -> bool:
    """Return whether values of a name are likely secrets.

    Example:
        >>> [is_secret_name(name) for name in ("X-Api-Key", "authToken", "pwd", "input_key", "num_layers")]
        [True, True, True, False, False]
    """
    words = _CAPITAL.sub("_", str(name)).lower()
    return bool(_SECRET.search(words)) and not _NO_SECRET.search(words)


def without_secret_urls(text: str) -> str:
    """Return a string in which the users and queries of URLs, and the paths of webhooks, are hidden.

    Example:
        >>> without_secret_urls("s3://me:s3cr3t@host/run is missing."), without_secret_urls("https://a.b/c?sig=s3cr3t")
        ('s3://(hidden)@host/run is missing.', 'https://a.b/c?(hidden)')
    """
    if "://" not in text:
        return text
    for user in set(_USER.findall(text)):
        text = text.replace(user, f"{HIDDEN}@")  # also where an error of a file system repeats it without its URL
    return _HOOK.sub(rf"\1{HIDDEN}", _QUERY.sub(rf"\1{HIDDEN}", text))


def hide_secrets(data: Any, name: object = "", *, is_secret: bool = False) -> Any:
    """Return nested data with ``"(hidden)"`` in place of the texts that are likely secrets.

    Numbers and None are kept. A string is a secret if its name is that of a secret, or the name of a dictionary or list
    around it; in other strings, the secret parts of URLs and of pairs such as ``token=abc`` and ``Bearer abc`` are
    hidden.

    Args:
        data: A value, or dictionaries, lists and tuples of values.
        name: Its name.
        is_secret: Whether all texts are secrets, whatever the name.

    Example:
        >>> hide_secrets({"auth": ("me", "s3cr3t"), "headers": {"X-Tenant": "s3cr3t"}, "max_tokens": 7, "uri": "s3://a"})
        {'auth': ('(hidden)', '(hidden)'), 'headers': {'X-Tenant': '(hidden)'}, 'max_tokens': 7, 'uri': 's3://a'}
    """
    is_secret = is_secret or is_secret_name(name)
    if isinstance(data, Mapping):
        return {key: hide_secrets(value, key, is_secret=is_secret) for key, value in data.items()}
    if type(data) in {list, tuple}:
        # A pair of a name and a value, as headers are also written.
        is_secret = is_secret or (len(data) == 2 and isinstance(data[0], str) and is_secret_name(data[0]))
        return type(data)(hide_secrets(value, is_secret=is_secret) for value in data)
    if is_secret and isinstance(data, (str, bytes)) and data:
        return HIDDEN
    return _without_secret_pairs(_TOKEN.sub(HIDDEN, without_secret_urls(data))) if isinstance(data, str) else data


def _without_secret_pairs(text: str) -> str:
    """Return a string in which the values behind names of secrets are hidden; other values may have such pairs, too."""
    parts, place = [], 0
    while name := _NAME.search(text, place):
        parts.append(text[place : name.end()])
        place = name.end()
        if is_secret_name(name[0].rstrip(" \t\r\n=:\"'")) and (value := _VALUE.match(text, place)):
            parts.append(HIDDEN)
            place = value.end()
    return "".join([*parts, text[place:]])
