"""Far nodes for tests: their tokens, workers in this process and as processes, and certificates made on the spot."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import trustme
from daemons import PROMPT, START_SECONDS, STOP_SECONDS, eventually

from compute_node.engine.arithmetic import ARITHMETIC, named_numerics
from compute_node.engine.generate import Finished, GenerationParams, Generator
from compute_node.engine.kernel_path import kernel_path
from compute_node.engine.model import Model, ModelOptions
from compute_node.text.tokenizer import Tokenizer
from compute_node.worker.expert_work import ExpertWork
from compute_node.worker.service import WorkerIdentity
from compute_node.worker.worker import Worker
from tierd.addresses import Address, parse_address
from tierd.client.in_process import InProcess
from tierd.client.open import FarOptions, open_source
from tierd.listening import Protection
from tierd.store.store import ExpertStore


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """What a node fetches of a store is nobody else's: on for all tests of a file that imports it."""
    monkeypatch.setattr("tierd.client.far.cache_directory", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def daemon(serve_module, embedded_store):
    """A daemon that a file's tests share, on a port of this host."""
    return serve_module(embedded_store, "--arena", "25%", listen="127.0.0.1:0")


def open_far(name, *, numerics="exact", arena=None, patience=20.0, told=None, **far):
    """The source of a node that is told nothing but an address."""
    return open_source(
        str(name), name="far", numerics=named_numerics(numerics), kernel_path=kernel_path(), arena=arena,
        patience=patience, far=FarOptions(**{"experts": "bytes"} | far), tell=(told if told is not None else []).append,
    )  # fmt: skip


@contextlib.contextmanager
def far_model(source, *, numerics="exact"):
    """A generator over a source; closes both."""
    options = ModelOptions(numerics=numerics, threads=1, context=160, rows=32)
    with closing(source), Model(source, options) as model:
        yield Generator(model, Tokenizer.from_store(source.store))


def tokens(generator, count=12, prompt=PROMPT):
    """What it says to the prompt."""
    params = GenerationParams(max_tokens=count, ignore_eos=True)
    *_, last = generator.generate(generator.tokenizer.encode(prompt), params)
    assert isinstance(last, Finished)
    return list(last.token_ids)


@contextlib.contextmanager
def worker_here(
    store, *, listen=None, numerics="exact", arithmetic=ARITHMETIC, path=None, protection=None, rows=64,
    fingerprint=None, told=None,
):  # fmt: skip
    """A worker in a thread of this process."""
    opened = ExpertStore.open(store)
    with (
        closing(InProcess(opened)) as source,
        closing(ExpertWork(source, numerics=numerics, threads=1, rows=rows)) as work,
        Worker(
            listen or Address(host="127.0.0.1", port=0),
            protection or Protection(),
            WorkerIdentity(fingerprint or opened.fingerprint, f"{numerics} {arithmetic}", path or kernel_path()),
            work,
            max_nodes=8,
            tell=(told if told is not None else []).append,
        ) as worker,
    ):
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            yield worker
        finally:
            worker.stop()
            thread.join(STOP_SECONDS)
            assert not thread.is_alive()


class WorkerProcess:
    """`compute-node worker` on a port of its own."""

    def __init__(self, store, *options, folder, listen="127.0.0.1:0"):
        self.log_path = folder / f"worker-{os.urandom(4).hex()}.log"
        self._command = [
            sys.executable,
            "-m",
            "compute_node",
            "worker",
            str(store),
            "--threads",
            "1",
            *map(str, options),
        ]
        self.start(listen)

    def start(self, listen=None):
        """Start it, again where it was."""
        arguments = [*self._command, "--listen", listen or str(self.address)]
        begin = self.log_path.stat().st_size if self.log_path.exists() else 0
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        def up():
            text = self.log_path.read_bytes()[begin:].decode()
            assert self.process.poll() is None, text
            return re.search(r"^listening on (\S+)$", text, flags=re.MULTILINE)

        self.address = parse_address(eventually(up, START_SECONDS)[1], option="worker")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """Ask it to stop; returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(STOP_SECONDS)


class Certificates:
    """An authority of this test's own, and files that it has signed."""

    def __init__(self, folder, name="tls"):
        self._authority = trustme.CA()
        self._folder = folder / name
        self._folder.mkdir()
        self.ca = self._folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)
        self.certificate, self.key = self.issue("server", "127.0.0.1", "localhost")

    def issue(self, name, *hosts):
        """A new certificate and its key under this name; written over older ones."""
        issued = self._authority.issue_cert(*(hosts or ("client.test",)))
        chain, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return chain, key


def token_file(path, token="0123456789abcdef-a-token"):
    """A file with a token, for both sides."""
    path.write_text(f"# made for a test\n{token}\n")
    return path
