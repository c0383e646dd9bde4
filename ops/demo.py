"""`make demo`: the service as a stranger would use it. Starts `colibri serve` as a process of its own, asks the demo model over gRPC,
kills a worker in the middle of an answer, and stops. Exit code 0 only if every part held."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from colibri.v1 import inference_pb2 as pb
from ops.commands.common import CommandError, describe_failure, human_bytes
from ops.commands.convert import progress_bar
from ops.commands.health import ask as ask_health
from ops.commands.streaming import Streamed, show_stream, write_text
from ops.models import ResolvedModel, resolve
from ops.processes import service_processes, worker_pids
from service.client import Client, generate_request
from service.config import cache_dir

QUESTIONS = ("What is the capital of France?", "Why is the sky blue? Answer in two sentences.")
ANSWER_TOKENS = 64
KILL_AFTER_CHARACTERS = 24  # of the last answer: early enough that most of it is still to come
START_SECONDS, STOP_SECONDS = 60.0, 40.0


def main() -> int:
    """Runs the demo; returns the exit code."""
    begin = time.monotonic()
    try:
        model = find_model()
        with server(model.path) as (process, target), Client(target, timeout=120) as client:
            answers = [ask(client, question) for question in QUESTIONS]
            show_processes(process.pid, model.path)
            survive_a_kill(client, process.pid, question=QUESTIONS[-1], expected=answers[-1].text)
            stop(process)
    except KeyboardInterrupt:
        return 130
    except Exception as failure:
        described = describe_failure(failure)
        if described is None:
            raise
        print(f"demo: {described[1]}", file=sys.stderr)
        return described[0]
    heading(f"done in {time.monotonic() - begin:.1f} s")
    return 0


def heading(text: str) -> None:
    """A line that stands out."""
    print(f"\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"== {text}", flush=True)


def find_model() -> ResolvedModel:
    """The demo model, converted on the first run; `tiny`, said clearly, where it can't be had."""
    heading("model")
    with progress_bar("converting the model, once") as progress:
        model = resolve("demo", cache=cache_dir(), progress=progress)
    print(f"{model.name}, {human_bytes(model.path.stat().st_size)}\n{model.path}")
    if model.note:
        print(f"NOTE: {model.note}.")
    return model


@contextmanager
def server(model: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A running `colibri serve` that is ready, and where to reach it. Its log is shown if anything goes wrong."""
    heading("starting colibri serve")
    folder = Path(tempfile.mkdtemp(prefix="colibri-demo-"))
    target, log = f"unix:{folder / 'demo.sock'}", folder / "serve.log"
    command = [sys.executable, "-m", "ops.cli", "serve", str(model), "--unix-socket", str(folder / "demo.sock"), *worker_options()]
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        wait_until_serving(process, target)
        print(f"SERVING after {time.monotonic() - begin:.2f} s on {target}")
        yield process, target
    except BaseException:
        print(f"--- the server's log:\n{log.read_text(errors='replace')}---", file=sys.stderr)
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        shutil.rmtree(folder)


def worker_options() -> list[str]:
    """At least one worker process beside the front end, also where the default plan would have none (a single CPU)."""
    return [] if len(os.sched_getaffinity(0)) > 1 else ["--workers-per-node", "1", "--threads-per-worker", "1"]


def wait_until_serving(process: subprocess.Popen[bytes], target: str) -> None:
    """Polls the health service. CommandError if the process ends or time runs out."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CommandError(f"colibri serve ended with exit code {process.returncode}")
        try:
            if ask_health(target, timeout=1.0) == "SERVING":
                return
        except grpc.RpcError:
            pass  # not listening yet
        time.sleep(0.05)
    raise CommandError(f"colibri serve was not ready after {START_SECONDS:.0f} s")


def show_processes(pid: int, model: Path) -> None:
    """Who computes where, and that the weights are there once."""
    heading("what runs where")
    processes = service_processes(pid, model)
    if not any(process.role == "worker" for process in processes):
        raise CommandError("no worker process runs beside the front end")
    for process in processes:
        lanes = "its own lane" if process.role == "front end" else f"lane {', '.join(map(str, process.lanes))}"
        cpus = ",".join(map(str, process.cpus))
        where = f"{process.role:9}  pid {process.pid:<8} {lanes:13} CPU {cpus:5} {process.threads:3} threads"
        print(f"{where}   weights in use {human_bytes(process.weights)}, memory (PSS) {human_bytes(process.pss)}")
    together = human_bytes(sum(process.pss for process in processes))
    print(f"all together {together}: the weights are one mapping, counted once")


def ask(client: Client, question: str) -> Streamed:
    """One greedy question, its answer shown as it comes, then the figures."""
    heading(question)
    streamed = show_stream(client.generate(request_for(question)), write=write_text)
    print(f"\n   [{streamed.summary()}]")
    return streamed


def request_for(question: str) -> pb.GenerateRequest:
    return generate_request(messages=[("user", question)], max_tokens=ANSWER_TOKENS, temperature=0)


def survive_a_kill(client: Client, pid: int, *, question: str, expected: str) -> None:
    """Asks again and kills a worker on the way; the answer must be the undisturbed one, and the worker must come back."""
    heading("the same again, with kill -9 of a worker in the middle")
    victim = worker_pids(pid)[0]
    streamed = show_stream(killing(client.generate(request_for(question)), victim), write=write_text)
    print(f"\n   [{streamed.summary()}]")
    if streamed.text != expected:
        raise CommandError("the answer differs from the undisturbed one")
    print(f"worker {victim} was killed; the answer is the same, character for character")
    deadline = time.monotonic() + 10
    while not (fresh := [worker for worker in worker_pids(pid) if worker != victim]):
        if time.monotonic() > deadline:
            raise CommandError("the killed worker did not come back within 10 s")
        time.sleep(0.02)
    print(f"a new worker, pid {fresh[0]}, has taken its place")


def killing(events: Iterator[pb.Delta | pb.Finish], victim: int) -> Iterator[pb.Delta | pb.Finish]:
    """Passes events on; kills the process once some text has come."""
    seen, killed = 0, False
    for event in events:
        if isinstance(event, pb.Delta):
            seen += len(event.text)
        if not killed and (seen >= KILL_AFTER_CHARACTERS or isinstance(event, pb.Finish)):
            killed = True
            os.kill(victim, signal.SIGKILL)
            write_text(f" [kill -9 {victim}] ")
        yield event


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM; the server must drain and exit with 0."""
    heading("stopping")
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=STOP_SECONDS)
    if code != 0:
        raise CommandError(f"colibri serve ended with exit code {code} after SIGTERM")
    print("drained, exit code 0")


if __name__ == "__main__":
    sys.exit(main())
