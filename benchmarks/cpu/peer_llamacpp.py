"""llama.cpp's server, as `cpu.peers` drives it: `PYTHON peer_llamacpp.py BASE ROWS [ADAPTER ...]`.

With `--quantise FILE BASE`, it only writes the base in the types of such a file, for example Q8_0.

Runs in the environment that `install_peers.sh` makes, which contains llama.cpp's sources and
server. Base and adapters are converted to GGUF in bfloat16, once, in the parent of their folders. A
request carries its adapters (`"lora"`), and each row has a slot. Requests with different adapters
do not share a step, as llama.cpp documents. `peer_wire` says what this program reads and answers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import peer_wire

MAX_TOKENS = 256
TIMEOUT_S = 900
INSTALLED = Path(sys.prefix)
SOURCE = INSTALLED / "source"


def main() -> None:
    """Answer until the input ends."""
    answer = peer_wire.answers()
    if sys.argv[1] == "--quantise":
        answer(str(quantise(Path(sys.argv[3]), sys.argv[2])))
        return
    base, num_rows, *folders = sys.argv[1:]
    # A quantised file is next to the folder that it was made from.
    folder_of_base = Path(base).with_name(Path(base).name.split(".")[0])
    model = Path(base) if base.endswith(".gguf") else convert_base(folder_of_base)
    adapters = [convert_adapter(Path(folder), folder_of_base) for folder in folders]
    with serving(model, adapters, int(num_rows)) as host:
        answer("ready")
        for batch in peer_wire.batches():
            with ThreadPoolExecutor(len(batch.prompts)) as threads:
                begin_s = time.perf_counter()
                jobs = [
                    threads.submit(complete, host, prompt, adapter, batch.num_tokens)
                    for prompt, adapter in zip(batch.prompts, batch.adapters, strict=True)
                ]
                outputs = [job.result() for job in jobs]
                wall_s = time.perf_counter() - begin_s
            answer({"wall_s": wall_s, "outputs": outputs})


def convert_base(folder: Path) -> Path:
    """Convert a base with llama.cpp's converter and a made-up vocabulary."""
    target = folder.with_name(f"{folder.name}.gguf")
    if not target.exists():
        sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]
        import gguf
        from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

        hparams = ModelBase.load_hparams(folder, False)
        kind: Any = get_model_class(get_model_architecture(hparams, ModelType.TEXT))

        class WithoutTokenizer(kind):  # type: ignore[misc]
            model_arch = kind.model_arch

            def set_vocab(self) -> None:
                """Write a made-up name for each token."""
                names = ["a", "b", "ab", *(f"t{i}" for i in range(3, hparams["vocab_size"]))]
                self.gguf_writer.add_tokenizer_model("gpt2")
                self.gguf_writer.add_tokenizer_pre("gpt-2")
                self.gguf_writer.add_token_list(names)
                self.gguf_writer.add_token_types([gguf.TokenType.NORMAL] * len(names))
                self.gguf_writer.add_token_merges(["a b"])

        partial = target.with_suffix(".tmp")
        WithoutTokenizer(folder, gguf.LlamaFileType.MOSTLY_BF16, partial, hparams=hparams).write()
        partial.rename(target)
    return target


def quantise(base: Path, file: str) -> Path:
    """Quantise a base with llama.cpp's own program."""
    target = base.with_name(f"{base.name}.{file}.gguf")
    if not target.exists():
        partial = target.with_suffix(".tmp")
        program = INSTALLED / "build" / "bin" / "llama-quantize"
        command = [str(program), str(convert_base(base)), str(partial), file]
        subprocess.run(command, check=True, stdout=sys.stderr)
        partial.rename(target)
    return target


def convert_adapter(folder: Path, base: Path) -> Path:
    """Convert an adapter with llama.cpp's converter."""
    target = folder.with_name(f"{folder.name}.gguf")
    if not target.exists():
        partial = target.with_suffix(".tmp")
        command = [sys.executable, str(SOURCE / "convert_lora_to_gguf.py"), str(folder)]
        options = ["--base", str(base), "--outtype", "bf16", "--outfile", str(partial)]
        subprocess.run([*command, *options], check=True, stdout=sys.stderr)
        partial.rename(target)
    return target


@contextlib.contextmanager
def serving(model: Path, adapters: list[Path], num_rows: int) -> Any:
    """The server's host and port, while it runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    threads = str(len(os.sched_getaffinity(0)))
    command = [str(INSTALLED / "build" / "bin" / "llama-server"), "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--no-webui", "--cache-ram", "0"]
    command += ["--parallel", str(num_rows), "--ctx-size", str(num_rows * MAX_TOKENS)]
    command += ["--threads", threads, "--threads-batch", threads]
    if adapters:
        command += ["--lora-init-without-apply", "--lora", ",".join(map(str, adapters))]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            host = f"127.0.0.1:{port}"
            while not is_ready(host):
                if server.poll() is not None:
                    log.seek(0)
                    sys.exit(f"llama-server ended:\n{log.read().decode(errors='replace')[-2000:]}")
                time.sleep(0.1)
            yield host
        finally:
            server.terminate()
            server.wait()


def is_ready(host: str) -> bool:
    """Whether the server has its model."""
    with contextlib.suppress(OSError):
        connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def complete(host: str, prompt: list[int], adapter: int | None, num_tokens: int) -> list[int]:
    """One request's tokens."""
    body = {
        "prompt": prompt,
        "n_predict": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "cache_prompt": False,
        "return_tokens": True,
        "lora": [] if adapter is None else [{"id": adapter, "scale": 1.0}],
    }
    connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
    connection.request(
        "POST", "/completion", json.dumps(body), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    text = response.read()
    connection.close()
    assert response.status == 200, text
    tokens: list[int] = json.loads(text)["tokens"]
    return tokens


if __name__ == "__main__":
    main()
