"""Checks the URLs of the state's database and of the samples' object store. Neither may hold a password."""

from __future__ import annotations

from urllib.parse import parse_qsl

from slime.types.errors import InvalidSetting

STORE, PAYLOADS = "--buffer-store", "--buffer-payloads"
FORMS = {
    STORE: (("postgresql", "postgres"), "postgresql://[USER@]HOST[:PORT]/DATABASE"),
    PAYLOADS: (("s3",), "s3://BUCKET[/PREFIX]"),
}
# Where the client of each looks for passwords and keys.
ELSEWHERE = {
    STORE: "PGPASSWORD, ~/.pgpass (PGPASSFILE) or ~/.pg_service.conf",
    PAYLOADS: "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws or the role of the machine",
}
SECRETS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")


def check_url(flag: str, url: str) -> None:
    """Raises InvalidSetting for a URL of another kind, or with a password, which the error does not repeat."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    # Up to the last @: a password may hold an @ and other characters that should have been escaped.
    user = rest.rpartition("@")[0]
    if ":" in user or any(name in SECRETS for name, _ in parse_qsl(query)):
        raise InvalidSetting(
            f"{flag} must hold no password: everyone on the machine can read arguments; use {ELSEWHERE[flag]}",
            field=flag, expected="a URL without a password",
        )  # fmt: skip
    schemes, form = FORMS[flag]
    if scheme not in schemes or flag == PAYLOADS and (not place.strip("/") or query):
        # A URL of another form may hold a password that was not found above.
        got = url if not set("@=") & set(url) else "another form"
        raise InvalidSetting.must_be(flag, f"a URL {form}", got=got)
