"""The store: whole objects under a URI, on a folder or on object storage, by one interface (obstore).

Objects are written once and whole. `put_new` is the only way to write: it takes a name that nobody has taken
(create-if-absent), so that two writers never overwrite each other. Tables live beside the objects (tables.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import obstore
import obstore.exceptions
from obstore.store import LocalStore, from_url

from manifests.errors import AtollError, Failure, ObjectMissing, ObjectTaken, StoreUnreachable, UserError

MARKER = "atoll.json"
SCHEMES = ("file", "s3", "gs", "az")
_RETRY = {"max_retries": 8, "retry_timeout": timedelta(seconds=60)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """What a listing says of one object."""

    path: str
    """Path below the store's root."""
    size_bytes: int
    modified_at: float
    """Seconds since the epoch, by the store's clock."""


class Store:
    """One store, addressed by paths relative to its root."""

    def __init__(self, uri: str) -> None:
        """Opens the address without touching it; nothing is created or checked.

        Args:
            uri: a folder's path, or `file:///…`, `s3://bucket/prefix`, `gs://…`, `az://…`.

        Raises:
            UserError: the scheme is none of these.
        """
        parsed = urlparse(uri)
        scheme = parsed.scheme or "file"
        if scheme not in SCHEMES:
            raise UserError(
                f"store {uri!r}: scheme {scheme!r} is not known; use a folder, file://, s3://, gs:// or az://"
            )
        self.is_local = scheme == "file"
        self._objects: Any
        if self.is_local:
            self.root = Path(unquote(parsed.path) if parsed.scheme else uri).absolute()
            self.uri = self.root.as_uri()
            self._objects = None
        else:
            if not parsed.netloc:
                raise UserError(f"store {uri!r} names no bucket; write {scheme}://BUCKET/PREFIX")
            self.uri = uri.rstrip("/")
            client = {"allow_http": True} if _endpoint().startswith("http://") else {}
            config: dict[str, Any] = {}
            if scheme == "s3":
                if _endpoint():
                    config["endpoint"] = _endpoint()
                config["region"] = _region()
            try:
                self._objects = from_url(self.uri, client_options=client, retry_config=_RETRY, **config)  # type: ignore[call-overload]
            except (obstore.exceptions.BaseError, ValueError) as e:
                raise UserError(f"store {uri!r} can't be addressed: {first_line(e)}") from e

    def __repr__(self) -> str:
        return f"Store({self.uri!r})"

    @property
    def objects(self) -> Any:
        """The obstore object behind this store; a local folder is made when first written to."""
        if self._objects is None:
            if not self.root.is_dir():
                raise UserError(
                    f"store {self.uri} doesn't exist; `atoll ingest` makes one, or name another with --store"
                )
            self._objects = LocalStore(self.root)
        return self._objects

    def table_uri(self, path: str) -> str:
        """The address of a table's folder, as delta-rs takes it."""
        return str(self.root / path) if self.is_local else f"{self.uri}/{path}"

    @property
    def table_options(self) -> dict[str, str] | None:
        """delta-rs storage options for this store; credentials come from the environment."""
        if not self.uri.startswith("s3://"):
            return None
        options = {k: v for k, v in os.environ.items() if k.startswith("AWS_")}
        options["AWS_REGION"] = _region()
        if _endpoint():
            options["AWS_ENDPOINT_URL"] = _endpoint()
            if _endpoint().startswith("http://"):
                options["AWS_ALLOW_HTTP"] = "true"
        return options

    def put_new(self, path: str, data: bytes) -> None:
        """Writes an object whole under a name that nobody has taken.

        A name that holds the very same bytes counts as ours: where a reply is lost, the request is sent again and meets its own object. So
        whoever claims something by a name must put in it what no other claimant would.

        Raises:
            ObjectTaken: the name is taken; the object there is untouched.
            StoreUnreachable: the store failed; whether the object exists now is unknown.
        """
        if not self._create(path, data) and self.get(path) != data:
            raise ObjectTaken(f"{self.uri}/{path} exists already")

    def put_content(self, path: str, data: bytes) -> bool:
        """Writes an object whose name is its content's hash. True: written now; False: it lay there already."""
        return self._create(path, data)

    def _create(self, path: str, data: bytes) -> bool:
        try:
            obstore.put(self.objects, path, data, mode="create", use_multipart=False)
        except obstore.exceptions.AlreadyExistsError:
            return False
        except _STORE_ERRORS as e:
            raise self._explain(e, path) from e
        return True

    def get(self, path: str) -> bytes:
        """Reads an object whole.

        Raises:
            ObjectMissing: there is no such object.
            StoreUnreachable: the store failed.
        """
        try:
            return obstore.get(self.objects, path).bytes().to_bytes()
        except FileNotFoundError as e:
            raise ObjectMissing(f"{self.uri}/{path} doesn't exist") from e
        except _STORE_ERRORS as e:
            raise self._explain(e, path) from e

    def exists(self, path: str) -> bool:
        """Whether an object of this name exists now."""
        try:
            obstore.head(self.objects, path)
        except FileNotFoundError:
            return False
        except _STORE_ERRORS as e:
            raise self._explain(e, path) from e
        return True

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects below a folder, in no promised order; `after` leaves out paths up to and including it."""
        try:
            for chunk in obstore.list(self.objects, prefix.rstrip("/") + "/", offset=after):
                for item in chunk:
                    yield ObjectInfo(
                        path=item["path"], size_bytes=item["size"], modified_at=item["last_modified"].timestamp()
                    )
        except FileNotFoundError:
            return
        except _STORE_ERRORS as e:
            raise self._explain(e, prefix) from e

    def delete(self, path: str) -> None:
        """Deletes an object; no error where there is none."""
        try:
            obstore.delete(self.objects, path)
        except FileNotFoundError:
            return
        except _STORE_ERRORS as e:
            raise self._explain(e, path) from e

    def make_root(self) -> None:
        """Makes the folder of a local store; buckets are not ours to make."""
        if not self.is_local:
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"store {self.uri} can't be made: {e.strerror}; name another folder with --store") from e

    def _explain(self, error: Exception, path: str) -> AtollError:
        where = f"{self.uri}/{path}"
        if isinstance(error, obstore.exceptions.PermissionDeniedError | obstore.exceptions.UnauthenticatedError):
            return UserError(f"{where}: access denied; check the credentials (AWS_ACCESS_KEY_ID and its like)")
        if isinstance(error, OSError | PermissionError):
            return Failure(f"{where}: {error.strerror or error}")
        return StoreUnreachable(f"{where}: {_without_password(first_line(error))}")


_STORE_ERRORS = (obstore.exceptions.BaseError, OSError)


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _without_password(text: str) -> str:
    """An address in an error may carry the credentials of a proxy or an endpoint."""
    return re.sub(r"(://)[^/@\s]+@", r"\1", text)


def first_line(error: Exception) -> str:
    """The first line of an error: obstore appends its whole debug tree."""
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
