"""Settings of services that listen and of clients that connect."""

from __future__ import annotations

from dataclasses import dataclass

from slime.types.settings import setting


@dataclass(kw_only=True)
class RpcSettings:
    """gRPC: address, transport security, limits."""

    host: str = setting(
        "127.0.0.1",
        "Address to listen on; any other than the loopback requires --tls-cert, --tls-key and --token-file, "
        "or --insecure",
    )
    port: int = setting(0, "Port to listen on; 0 lets the system pick one", minimum=0, maximum=65535)
    tls_cert: str | None = setting(None, "PEM file of the server's certificate chain", metavar="FILE")
    tls_key: str | None = setting(None, "PEM file of the server's private key", metavar="FILE")
    tls_ca: str | None = setting(None, "PEM file of the certificate authority that a client trusts", metavar="FILE")
    token_file: str | None = setting(
        None,
        "File (mode 0600) with the bearer token that every call must carry; without it, a service on the loopback "
        "generates one",
        metavar="FILE",
    )
    insecure: bool = setting(False, "Listen and send the token without TLS; without --token-file, ask for no token")
    max_message_mb: int = setting(64, "Largest message, in MiB", minimum=1, maximum=2047)
    rpc_threads: int = setting(32, "Threads that answer calls", minimum=2)
    call_timeout_seconds: float = setting(60.0, "Deadline in seconds of a call that sets none", above=0)
    retry_seconds: float = setting(
        5.0, "Seconds during which a call is repeated while its server is unavailable", minimum=0
    )
