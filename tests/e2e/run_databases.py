"""Databases for the buffer of a run: PostgreSQL and an object store."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import boto3
import postgres_server
from moto.server import ThreadedMotoServer

SCHEMA = "whole_run"


@contextmanager
def databases(
    set_variable: Callable[[str, str], None],
) -> Iterator[tuple[postgres_server.PostgresServer, tuple[str, ...]]]:
    """Starts both; gives the database's server, and flags of a buffer whose state is in its schema SCHEMA and whose
    samples are in the object store, to which the variables that are set lead."""
    s3 = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    s3.start()
    try:
        variables = {
            "AWS_ENDPOINT_URL_S3": "http://{}:{}".format(*s3.get_host_and_port()), "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        for name, value in variables.items():
            set_variable(name, value)
        boto3.client("s3").create_bucket(Bucket="samples")
        with postgres_server.postgres_server() as server:
            server.execute(f"CREATE SCHEMA {SCHEMA}")
            # The store of this process keeps what an earlier test has put into its bucket.
            prefix = f"s3://samples/run-{secrets.token_hex(4)}"
            yield server, ("--buffer-store", server.url(SCHEMA), "--buffer-payloads", prefix)
    finally:
        s3.stop()
