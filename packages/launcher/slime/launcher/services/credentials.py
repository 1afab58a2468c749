"""The token and the certificates of the services of one run.

The run has one token, which never crosses a network in plain text: each service process generates a key pair, and the
launcher encrypts the token for its public key. On several nodes, the services talk through TLS, with certificates that
an authority of this run alone has signed. Private keys stay where they were generated. Tokens of roles
(`slime.types.rpc.roles`) are written for the user's own clients, in a directory that nobody else can read.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import errno
import ipaddress
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from slime.types.errors import InvalidFile
from slime.types.rpc import RpcSettings, token_files
from slime.types.rpc.roles import Role, role_token
from slime.types.scratch import ScratchDirectory

log = logging.getLogger(__name__)

CURVE = ec.SECP256R1()
CA, ADDRESSES = "ca.pem", "addresses.json"
# Clocks of nodes differ. A short life would gain nothing: the authority's key ends with the run.
EARLIER, LATER = datetime.timedelta(days=1), datetime.timedelta(days=3650)


@dataclass(frozen=True)
class Grant:
    """A token and certificate for one serving process, useless without the private key that it was made for.

    certificate, authority: PEM; None for a service on the loopback.
    """

    sender: bytes
    sealed_token: bytes
    certificate: bytes | None = None
    authority: bytes | None = None


class Authority:
    """The launcher's side: generates the token and signs certificates. several_nodes: services use TLS."""

    def __init__(self, *, several_nodes: bool) -> None:
        self.token = secrets.token_hex(32)
        self._several_nodes = several_nodes
        self._directory: Path | None = None

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        return ec.generate_private_key(CURVE)

    @cached_property
    def _own_certificate(self) -> x509.Certificate:
        name = _name("slime run")
        return (
            _certificate(name, name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def grant(self, public_key: bytes, host: str) -> Grant:
        """Makes the grant for the process with this public key (DER), whose service listens on `host`."""
        key = serialization.load_der_public_key(public_key)
        assert isinstance(key, ec.EllipticCurvePublicKey)
        sender = ec.generate_private_key(CURVE)
        # The pair of keys is used only once, so a fixed nonce is safe.
        sealed = AESGCM(_shared(sender, key)).encrypt(bytes(12), self.token.encode(), None)
        grant = Grant(_public(sender), sealed)
        if not self._several_nodes:
            return grant
        try:
            place: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            place = x509.DNSName(host)
        certificate = (
            _certificate(_name(f"slime service on {host}"), self._own_certificate.subject, key)
            .add_extension(x509.SubjectAlternativeName([place]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return dataclasses.replace(grant, certificate=_pem(certificate), authority=_pem(self._own_certificate))

    @cached_property
    def client_settings(self) -> RpcSettings:
        """The settings with which this process calls the services."""
        authority = in_memory("ca", _pem(self._own_certificate)) if self._several_nodes else None
        return RpcSettings(token_file=in_memory("token", self.token.encode()), tls_ca=authority)

    def write(self, directory: Path, addresses: Mapping[str, str]) -> None:
        """Writes the roles' tokens to ROLE.token, `addresses` to addresses.json, the authority to ca.pem.

        Only this user can read them; on a file system without modes, warns and writes nothing.
        """
        try:
            token_files.private_directory(directory)
        except (InvalidFile, OSError) as error:
            log.warning("no tokens for clients of this run: %s", error)
            return
        self._directory = directory
        for role in Role:
            token_files.write_private(directory / _token_name(role), f"{role_token(self.token, role)}\n")
        if self._several_nodes:
            token_files.write_private(directory / CA, _pem(self._own_certificate).decode())
        token_files.write_private(directory / ADDRESSES, json.dumps(dict(addresses), indent=2) + "\n")
        log.info("clients of this run find their tokens in %s", directory)

    def close(self) -> None:
        """Removes the files of `write`, whose tokens are no longer valid."""
        if self._directory is not None:
            remove_access(self._directory)
            self._directory = None


def remove_access(directory: Path) -> None:
    """Removes the files of `Authority.write` in `directory`, also those of a run that was killed, and then `directory`
    if it is empty. Other files stay."""
    names = {CA, ADDRESSES, *map(_token_name, Role)}
    try:
        if directory.is_symlink() or not directory.is_dir():
            return
        for path in directory.iterdir():
            # `write_private` writes to a temporary name like ".feed.token.1a2b3c4d" first.
            if path.name in names or (path.name.startswith(".") and path.stem[1:] in names):
                path.unlink()
        directory.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            log.warning("cannot remove the tokens in %s: %s", directory, error.strerror)


def _token_name(role: Role) -> str:
    return f"{role}.token"


class Identity:
    """A service process's side: its key pair, which never leaves its memory."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(CURVE)

    @property
    def public_key(self) -> bytes:
        return _public(self._key)

    def accept(self, grant: Grant, rpc: RpcSettings) -> RpcSettings:
        """Returns `rpc` with the token and certificates of the run as files in memory.

        With a grant without a certificate, the server raises InvalidSetting for a host beyond the loopback.
        """
        sender = serialization.load_der_public_key(grant.sender)
        assert isinstance(sender, ec.EllipticCurvePublicKey)
        token = AESGCM(_shared(self._key, sender)).decrypt(bytes(12), grant.sealed_token, None)
        rpc = dataclasses.replace(rpc, token_file=in_memory("token", token))
        if grant.certificate is None or grant.authority is None:
            return rpc
        private = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return dataclasses.replace(
            rpc,
            tls_cert=in_memory("cert", grant.certificate),
            tls_key=in_memory("key", private),
            tls_ca=in_memory("ca", grant.authority),
        )


def in_memory(name: str, content: bytes) -> str:
    """Returns the path of a private file that ends with this process. Only Linux has such files in memory; elsewhere
    it is on disk, and if this process is killed, the next one of this user removes it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create(name)
        os.fchmod(file, 0o600)
        os.write(file, content)
        return f"/proc/self/fd/{file}"
    file, path = tempfile.mkstemp(prefix=f"{name}-", dir=_directory_of_files())
    with os.fdopen(file, "wb") as private:
        private.write(content)
    return path


@cache
def _directory_of_files() -> Path:
    directory = ScratchDirectory("slime-credentials-")
    atexit.register(directory.close)
    return directory.path


def _shared(key: ec.EllipticCurvePrivateKey, other: ec.EllipticCurvePublicKey) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt=None, info=b"slime run token").derive(key.exchange(ec.ECDH(), other))


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])])


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + LATER)
    )
