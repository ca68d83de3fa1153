"""`distdl serve` over real sockets: answers, bad input, batches, the queue, its start and end."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import shutil
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from distdl.cli.serve import model as find_model
from tests.conftest import UNCHECKED, status
from tests.serving.colours import Gated, Server, photo, without_distdl, write_model
from tests.serving.conftest import CLASSES, RUN, VAL, validation_images
from tests.waiting import until

MB = 2**20
HEAD = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: "


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def served(model) -> Iterator[Server]:
    """One server for all requests that need no other settings; distdl is not installed there."""
    with without_distdl(model) as server:
        yield server


@pytest.fixture
def gated(background, model, tmp_path):
    def start(*settings: str, loading: bool = False) -> Gated:
        if loading:
            (tmp_path / "loading").touch()
        server = Gated(background, model, tmp_path, *settings)
        return server if loading else server.make_ready()

    return start


def short(value: object) -> str:
    return ascii(value)[:20]


def text(colour: str = "red") -> str:
    return base64.b64encode(photo(colour)).decode()


def as_json(**fields: object) -> bytes:
    return json.dumps(fields).encode()


# An image of 16 bits per channel, which PIL cannot write: 1 x 1 pixels, blue.
def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


BLUE_16 = png(1, 1, 16, 2, struct.pack(">BHHH", 0, 0, 0, 65535))
LARGE_PNG = png(10_000, 10_000, 1, 0, bytes(1251 * 10_000))
LARGE_JPEG = photo().replace(struct.pack(">HH", 40, 48), struct.pack(">HH", 10_000, 10_000))


@pytest.mark.parametrize("path", ["/score", "/invocations"])
@pytest.mark.parametrize(
    ("body", "kind", "colours"),
    [
        (photo("green"), "image/jpeg", ["green"]),
        (photo("green"), "application/octet-stream", ["green"]),
        (photo("blue", mode="CMYK"), "image/jpeg; q=1", ["blue"]),
        (photo("blue", "PNG", "RGBA"), "image/png", ["blue"]),
        (photo("green", "WEBP"), "image/webp", ["green"]),
        (BLUE_16, "image/png", ["blue"]),
        (as_json(images=[text("red"), text("blue")]), "application/json", ["red", "blue"]),
        (as_json(instances=[{"image": text("blue")}]), "application/json", ["blue"]),
        (as_json(instances=[{"b64": text("blue")}]), "application/json", ["blue"]),
        (as_json(inputs={"image": [text("blue")]}), "application/json", ["blue"]),
        (as_json(dataframe_records=[{"image": text()}]), "application/json", ["red"]),
        (
            as_json(dataframe_split={"columns": ["image"], "data": [[text()], [text("blue")]]}),
            "application/json; charset=utf-8",
            ["red", "blue"],
        ),
        (as_json(images=[text()] * 64, top_k=9**30), "application/json", ["red"] * 64),
    ],
    ids=short,
)
def test_answers(served, path, body, kind, colours) -> None:
    code, content = served.ask("POST", path, body, kind)
    assert code == 200 and [each["class"] for each in content["predictions"]] == colours
    for each in content["predictions"]:
        assert each["top"][0] == {"class": each["class"], "probability": each["probability"]}
        assert sum(top["probability"] for top in each["top"]) == pytest.approx(1)


def test_top_k_is_that_of_each_request(served) -> None:
    body = as_json(images=[text()], top_k=2)
    (answer,) = served.ask("POST", "/score", body, "application/json")[1]["predictions"]
    assert len(answer["top"]) == 2


def eps() -> bytes:
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize(
    ("body", "kind", "expected", "sentence"),
    [
        (b"", "image/jpeg", 400, "the body is empty"),
        (b"hello", "image/jpeg", 400, "is not an image"),
        (photo(form="GIF"), "image/jpeg", 400, "is not an image"),
        (eps(), "image/jpeg", 400, "is not an image"),
        (photo()[:300], "image/jpeg", 400, "image 0"),
        (photo()[:-200], "image/jpeg", 400, "image 0"),
        (LARGE_PNG, "image/png", 413, "megapixels"),
        (LARGE_JPEG, "image/jpeg", 413, "megapixels"),
        (photo(form="PNG", size=(60_000, 1)), "image/png", 413, "long and narrow"),
        (photo(), "", 415, "the content type is missing"),
        (photo(), "text/html", 415, "the content type is text/html"),
        (photo(), "x" * 5000, 415, "the content type is xxx"),
        (photo(), "application/json", 400, "Invalid JSON"),
        (b"{", "application/json", 400, "Invalid JSON"),
        (b"\xff\xfe{", "application/json", 400, "Invalid JSON"),
        (b'{"images": ' + b"[" * 900, "application/json", 400, "Invalid JSON"),
        (b'{"images": ' + b"[" * 400 + b"]" * 400 + b"}", "application/json", 400, "Invalid JSON"),
        (b"[" * 10**6 + b"]" * 10**6, "application/json", 400, "too many parts"),
        (b"[" + b"{}," * 10**6 + b"{}]", "application/json", 400, "too many parts"),
        (b"[]", "application/json", 400, "'body': Input should be an object"),
        (b"NaN", "application/json", 400, "'body': Input should be an object"),
        (b"null", "application/json", 400, "'body': Input should be an object"),
        (as_json(), "application/json", 400, "'images': Field required"),
        (as_json(images=[]), "application/json", 400, "'images': List should have at least 1"),
        (as_json(images=[text()], topk=1), "application/json", 400, "'topk': Extra"),
        (
            as_json(images="abcd"),
            "application/json",
            400,
            "'images': Input should be a valid array",
        ),
        (as_json(images={"image": 3}), "application/json", 400, "should be a valid array"),
        (as_json(dataframe_split=[1]), "application/json", 400, "'images': Field required"),
        (as_json(dataframe_split={"data": 5}), "application/json", 400, "should be a valid array"),
        (as_json(images=[None]), "application/json", 400, "'images.0': Input"),
        (as_json(images=[float("nan")]), "application/json", 400, "'images.0': Input"),
        (as_json(images=[text(), "\ud800"]), "application/json", 400, "Invalid JSON"),
        (as_json(images=[text(), "abc$"]), "application/json", 400, "'images.1': Base64"),
        (as_json(images=[text(), ""]), "application/json", 400, "image 1: is not an image"),
        (as_json(images=[text()] * 65), "application/json", 413, "at most 64 items"),
        (as_json(images=[text()], top_k=0), "application/json", 400, "top_k"),
        (as_json(images=[text()], top_k=float("nan")), "application/json", 400, "top_k"),
        (b'{"top_k": ' + b"9" * 5000 + b"}", "application/json", 400, "the JSON is not"),
    ],
    ids=short,
)
def test_bad_input_has_one_sentence_and_the_next_request_an_answer(
    served, body, kind, expected, sentence
) -> None:
    answered, content = served.ask("POST", "/score", body, kind)
    assert (answered, content.keys()) == (expected, {"error"}), content
    assert sentence in content["error"] and "\n" not in content["error"]
    assert served.score()[0] == 200


def parts(size: int) -> Iterator[bytes]:
    yield from (bytes(MB) for _ in range(size // MB))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_body_of_200_mb(served, chunked, connection) -> None:
    before = served.memory()
    length = {"Transfer_Encoding": "chunked"} if chunked else {"Content_Length": str(200 * MB)}
    more = {"Connection": connection, **length}
    code, content = served.score(parts(200 * MB), **more)
    assert code == 413 and content["error"] == "the body is larger than 32 MiB"
    assert served.memory() - before < 150 * MB
    assert served.score()[0] == 200


def test_many_large_bodies_at_once(served) -> None:
    before, body = served.memory(), bytes(30 * MB)
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        answers = [*pool.map(served.score, [body] * 50)]
    assert {code for code, _ in answers} <= {400, 503}
    assert served.memory() - before < 700 * MB
    assert served.score()[0] == 200


def test_a_length_that_is_not_true(served) -> None:
    for length, expected in ((str(200 * MB), b" 413 "), ("-1", b" 400 "), ("x", b" 400 ")):
        with served.connect() as client:
            head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
            client.sendall(head.encode() + b"abc")
            client.shutdown(socket.SHUT_WR)
            assert expected in (client.recv(1000) or expected)
        assert served.score()[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/", 404),
        ("POST", "/scores", 404),
        ("GET", "/docs", 404),
        ("GET", "/score", 405),
        ("PUT", "/score", 405),
        ("POST", "/health", 405),
    ],
)
def test_other_paths_and_methods(served, method, path, expected) -> None:
    answered, content = served.ask(method, path)
    assert answered == expected and "POST /score and /invocations" in content["error"]


def test_requests_in_a_row_on_one_connection(served) -> None:
    body = photo("blue")
    one = HEAD + b"%d\r\n\r\n" % len(body) + body
    with served.connect() as client:
        client.sendall(one + one + b"\x00garbage\r\n\r\n")
        received = b""
        while data := client.recv(1 << 16):
            received += data
    assert received.count(b'"class":"blue"') == 4 and received.count(b"HTTP/1.1 200") == 2
    assert received.count(b"HTTP/1.1 400") == 1
    assert served.score()[0] == 200


def test_an_answer_waits_for_no_acknowledgement(served) -> None:
    """Nagle's algorithm would hold the second part of an answer up for 40 ms."""
    body, seconds = photo(), []
    request = HEAD + b"%d\r\n\r\n" % len(body) + body
    with served.connect() as client:
        for _ in range(40):
            started = time.perf_counter()
            client.sendall(request)
            received = b""
            while not received.endswith(b"]}"):
                received += client.recv(1 << 16)
            seconds.append(time.perf_counter() - started)
    assert sorted(seconds)[10] < 0.035


def test_health_counts(served) -> None:
    before = served.health()
    served.score()
    served.score(b"x")
    after = served.health()
    assert after["requests"] == before["requests"] + 1
    assert after["rejected"] == before["rejected"] + 1
    assert after["queue"] == 0 and 0 < after["latency_ms"]["p50"] <= after["latency_ms"]["p99"]
    assert served.ask("GET", "/ready")[0] == served.ask("GET", "/ping")[0] == 200


def in_background(function, *arguments) -> concurrent.futures.Future:
    future: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_the_port_is_open_while_the_model_loads(gated) -> None:
    server = gated(loading=True)
    assert server.health()["status"] == "loading"
    assert [server.ask("GET", path)[0] for path in ("/ping", "/ready")] == [503, 503]
    assert server.score() == (503, {"error": "the model is being loaded: try again later"})
    server.set()
    server.make_ready()
    assert server.score()[0] == 200 and server.health()["status"] == "ready"


def test_batches_and_a_full_queue(gated) -> None:
    """What comes while the model is busy becomes one batch; what the queue cannot hold is refused
    at once."""
    server = gated("serve.max_queue=6", "serve.max_batch=4")
    server.set("closed")
    answers = [in_background(server.score)]
    until(lambda: server.health()["batches"] == {"1": 1})  # it is with the model
    answers += [in_background(server.score, photo("blue")) for _ in range(5)]
    until(lambda: server.health()["queue"] == 6)
    assert server.score() == (503, {"error": "the queue is full: try again later"})
    server.set()
    assert {answer.result(60)[0] for answer in answers} == {200}
    assert server.health()["batches"] == {"1": 2, "4": 1} and server.health()["queue"] == 0


def test_the_time_limit_of_a_request(gated) -> None:
    server = gated("serve.timeout_s=0.5")
    server.set("closed")
    assert server.score() == (504, {"error": "no answer within 0.5 s"})
    assert server.score() == (504, {"error": "no answer within 0.5 s"})
    with server.connect() as client:
        client.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        assert b" 408 " in client.recv(1000)
    server.set()
    assert server.score()[0] == 200 and server.scored() == 2


def test_a_model_that_fails(gated) -> None:
    server = gated()
    server.set("broken")
    assert server.score() == (500, {"error": "the model failed: the server's log says why"})
    server.set()
    assert server.score()[0] == 200
    assert "RuntimeError: broken" in server.started.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_was_accepted_is_answered_at_the_end(gated, number) -> None:
    server = gated()
    server.set("closed")
    answers = [in_background(server.score) for _ in range(3)]
    until(lambda: server.health()["queue"] == 3)
    server.process.send_signal(number)

    until(lambda: not server.listens())
    assert not concurrent.futures.wait(answers, timeout=0.5).done
    server.set()
    assert {answer.result(60)[0] for answer in answers} == {200}
    assert server.started.wait() == 0 and "ended 3" in server.started.output()


def test_the_token(gated, monkeypatch) -> None:
    server = gated("serve.host=0.0.0.0", "serve.token=s3cret")
    for sent in ({}, {"Authorization": "Bearer s3creT"}, {"Authorization": "s3cret"}):
        code, content = server.score(**sent)
        assert code == 401 and "s3cret" not in str(content)
    assert server.score(Authorization="Bearer s3cret")[0] == 200
    assert "s3cret" not in str(server.health()) and server.ask("GET", "/ping")[0] == 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["serve.max_bach=3"],
            "serve.max_bach: no such setting\n      did you mean serve.max_batch?",
        ),
        (["serve.max_batch=many"], "serve.max_batch: 'many' is not an integer"),
        (["serve.max_batch=0"], "serve.max_batch: '0' is not greater than or equal to 1"),
        (["serve.port=70000"], "serve.port: '70000' is not less than or equal to 65535"),
        (["serve.timeout_s=nan"], "serve.timeout_s: 'nan' is not"),
        (["port=80"], "port: no such setting"),
        (["serve.host=0.0.0.0"], "serve.token is required"),
        (["serve.host=::", "serve.token=null"], "serve.token is required"),
        (["serve.token="], "serve.token: '' is not"),
        (["serve.host=192.0.2.1", "serve.no_token=true"], "bind on address ('192.0.2.1', 8080)"),
        (["serve.max_batch=0", "serve.prot=1"], "2 problems"),
    ],
)
def test_refused_settings(command, model, words, message) -> None:
    done = command("serve", str(model), *words)
    assert done.code == 2 and message in done.err


def test_refused_folders(command, model, tmp_path) -> None:
    for name, message in (("nothing", "there is no such folder"), (".", "is not a run")):
        done = command("serve", name)
        assert done.code == 2 and f"{name}: {message}" in done.err
    (tmp_path / "weights").mkdir()
    fields = json.loads((model / "model.json").read_text()) | {"kind": "weights"}
    (tmp_path / "weights/model.json").write_text(json.dumps(fields))
    message = "holds weights, which distdl serve does not run"
    assert message in command("serve", "weights").err
    (tmp_path / "weights/model.json").write_text((model / "model.json").read_text())
    done = command("serve", "weights", "serve.port=0")
    assert done.code == 2 and "weights cannot be read; export it again" in done.err


def test_the_model_folder_in_an_mlflow_model(pt2, tmp_path) -> None:
    folder = shutil.copytree(pt2, tmp_path / "artifacts/model")
    assert find_model(tmp_path) == folder and find_model(folder) == folder


def test_a_run_is_served_as_it_was_validated(project, background) -> None:
    """From a run to answers in one command, with an export if there is none."""
    started = background("serve", RUN, "serve.port=0", cwd=project, module=UNCHECKED)
    started.until(lambda: "stop    " in started.output())
    port = int(started.output().split("serve   http://127.0.0.1:")[1].split()[0])
    server = Server(started.process, port)
    assert "(3 classes)" in started.output() and "images/val/" in started.output()
    images = validation_images(project)
    answers = [server.score(path.read_bytes())[1]["predictions"][0] for path in images]
    hits = sum(
        answer["class"] == path.parent.name for answer, path in zip(answers, images, strict=True)
    )
    metrics = status(project / RUN)["metrics"]
    assert hits / (VAL * len(CLASSES)) == pytest.approx(metrics["val/acc1"], abs=1e-6)
    started.process.send_signal(signal.SIGINT)
    assert started.wait() == 0 and f"done    {len(images)} answered  0 refused" in started.output()
