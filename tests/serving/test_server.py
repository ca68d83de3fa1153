"""`distdl serve` over real sockets: answers, bad input, batches, the queue, its start and end."""

import base64
import json
import shutil
import signal
import socket
import struct
import time
import zlib
from concurrent import futures

import pytest

from distdl.cli.serve import model as find_model
from distdl.tools.serving.batching import DECODERS
from tests.conftest import UNCHECKED, matrix_only, status
from tests.serving.colours import Gated, Server, photo, without_distdl, write_model
from tests.serving.conftest import EXPORTED, RUN, accuracy, validation_images
from tests.waiting import until

MB = 2**20
HEAD = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: "


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def served(model):
    """One server for all requests that need no other settings; distdl is not installed there."""
    with without_distdl(model) as server:
        yield server


@pytest.fixture
def pool():
    with futures.ThreadPoolExecutor(50) as threads:
        yield threads


def text(colour="red"):
    return base64.b64encode(photo(colour)).decode()


def as_json(**fields):
    return json.dumps(fields).encode()


# An image of 16 bits per channel, which PIL cannot write: 1 x 1 pixels, blue.
def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth, colour, rows):
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


BLUE_16 = png(1, 1, 16, 2, struct.pack(">BHHH", 0, 0, 0, 65535))
LARGE_PNG = png(10_000, 10_000, 1, 0, bytes(1251 * 10_000))
JSON = "application/json"
SPLIT = {"columns": ["image"], "data": [[text()], [text("blue")]]}


@pytest.mark.parametrize(
    ("body", "kind", "colours"),
    [
        (photo("green"), "application/octet-stream", ["green"]),
        (photo("blue", mode="CMYK"), "image/jpeg; q=1", ["blue"]),
        (photo("blue", "PNG", "RGBA"), "image/png", ["blue"]),
        (photo("green", "WEBP"), "image/webp", ["green"]),
        (BLUE_16, "image/png", ["blue"]),
        (as_json(images=[text("red"), text("blue")]), JSON, ["red", "blue"]),
        (as_json(instances=[{"image": text("blue")}]), JSON, ["blue"]),
        (as_json(instances=[{"b64": text("blue")}]), JSON, ["blue"]),
        (as_json(inputs={"image": [text("blue")]}), JSON, ["blue"]),
        (as_json(dataframe_records=[{"image": text()}]), JSON, ["red"]),
        (as_json(dataframe_split=SPLIT), "application/json; charset=utf-8", ["red", "blue"]),
        (as_json(images=[text()] * 64, top_k=9**30), JSON, ["red"] * 64),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_answers(served, body, kind, colours):
    path = "/invocations" if "json" in kind else "/score"
    code, content = served.ask("POST", path, body, kind)
    assert code == 200
    assert [each["class"] for each in content["predictions"]] == colours
    for each in content["predictions"]:
        assert each["top"][0] == {"class": each["class"], "probability": each["probability"]}
        assert sum(top["probability"] for top in each["top"]) == pytest.approx(1)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
DEEP = b'{"images": ' + b"[" * 400 + b"]" * 400 + b"}"


@pytest.mark.parametrize(
    ("body", "kind", "expected", "sentence"),
    [
        (b"", "image/jpeg", 400, "the body is empty"),
        (b"hello", "image/jpeg", 400, "is not an image"),
        (EPS, "image/jpeg", 400, "is not an image"),  # PIL would start Ghostscript
        (photo()[:-200], "image/jpeg", 400, "image 0"),
        (LARGE_PNG, "image/png", 413, "megapixels"),
        (photo(form="PNG", size=(60_000, 1)), "image/png", 413, "long and narrow"),
        (photo(), "", 415, "the content type is missing"),
        (photo(), "x" * 5000, 415, "the content type is xxx"),
        (photo(), JSON, 400, "Invalid JSON"),
        (DEEP, JSON, 400, "Invalid JSON"),
        (b"[" + b"{}," * 10**6 + b"{}]", JSON, 400, "too many parts"),
        (b"NaN", JSON, 400, "'body': Input should be an object"),
        (as_json(), JSON, 400, "'images': Field required"),
        (as_json(images=[]), JSON, 400, "'images': List should have at least 1"),
        (as_json(images=[text()], topk=1), JSON, 400, "'topk': Extra"),
        (as_json(images={"image": 3}), JSON, 400, "should be a valid array"),
        (as_json(dataframe_split=[1]), JSON, 400, "'images': Field required"),
        (as_json(images=[None]), JSON, 400, "'images.0': Input"),
        (as_json(images=[text(), "\ud800"]), JSON, 400, "Invalid JSON"),
        (as_json(images=[text(), "abc$"]), JSON, 400, "'images.1': Base64"),
        (as_json(images=[text(), ""]), JSON, 400, "image 1: is not an image"),
        (as_json(images=[text()] * 65), JSON, 413, "at most 64 items"),
        (as_json(images=[text()], top_k=0), JSON, 400, "top_k"),
        (b'{"top_k": ' + b"9" * 5000 + b"}", JSON, 400, "the JSON is not"),
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_bad_input_has_one_sentence_and_the_next_request_an_answer(
    served, body, kind, expected, sentence
):
    answered, content = served.ask("POST", "/score", body, kind)
    assert (answered, content.keys()) == (expected, {"error"}), content
    assert sentence in content["error"]
    assert "\n" not in content["error"]
    assert served.score()[0] == 200


@pytest.mark.parametrize("more", [{"Transfer_Encoding": "chunked"}, {"Connection": "close"}])
def test_a_body_of_200_mb(served, more):
    before = served.memory()
    length = {} if "Transfer_Encoding" in more else {"Content_Length": str(200 * MB)}
    code, content = served.score((bytes(MB) for _ in range(200)), **more, **length)
    assert code == 413
    assert content["error"] == "the body is larger than 32 MiB"
    assert served.memory() - before < 150 * MB
    assert served.score()[0] == 200


def test_many_large_bodies_at_once(served, pool):
    before = served.memory()
    answers = [*pool.map(served.score, [bytes(30 * MB)] * 50)]
    assert {code for code, _ in answers} <= {400, 503}
    assert served.memory() - before < 700 * MB
    assert served.score()[0] == 200


def test_a_length_that_is_not_true(served):
    for length in ("-1", "x"):
        with served.connect() as client:
            head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
            client.sendall(head.encode() + b"abc")
            assert b" 400 " in client.recv(1000)
        assert served.score()[0] == 200


@pytest.mark.parametrize("length", [1000, 200 * MB])
def test_a_body_that_ends_before_its_length(served, length):
    with served.connect() as client:
        client.sendall(b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\nabc" % length)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000) == b""  # it is hung up on, and nothing waits for the rest
    assert served.score()[0] == 200


def test_other_paths_and_methods(served):
    wrong = {"GET /": 404, "POST /scores": 404, "GET /docs": 404, "GET /score": 405}
    for asked, expected in (wrong | {"POST /health": 405}).items():
        answered, content = served.ask(*asked.split())
        assert answered == expected
        assert "POST /score and /invocations" in content["error"]


def test_requests_in_a_row_on_one_connection(served):
    body = photo("blue")
    seconds = []
    received = b""
    one = HEAD + b"%d\r\n\r\n" % len(body) + body
    with served.connect() as client:
        for number in range(40):
            started = time.perf_counter()
            client.sendall(one)
            while received.count(b"]}]}") <= number:  # the end of an answer
                received += client.recv(1 << 16)
            seconds.append(time.perf_counter() - started)
        client.sendall(one + one + b"\x00garbage\r\n\r\n")
        while data := client.recv(1 << 16):
            received += data
    # Nagle's algorithm would hold the second part of an answer up for 40 ms.
    assert sorted(seconds)[10] < 0.035
    assert received.count(b"HTTP/1.1 200") == 42
    assert received.count(b"HTTP/1.1 400") == 1
    assert served.score()[0] == 200


def test_health_counts(served):
    before = served.health()
    body = as_json(images=[text()], top_k=2)
    (answer,) = served.ask("POST", "/score", body, JSON)[1]["predictions"]
    assert len(answer["top"]) == 2
    served.score(b"x")
    after = served.health()
    assert after["requests"] == before["requests"] + 1
    assert after["rejected"] == before["rejected"] + 1
    assert after["queue"] == 0
    assert 0 < after["latency_ms"]["p50"] <= after["latency_ms"]["p99"]
    assert served.ask("GET", "/ready")[0] == served.ask("GET", "/ping")[0] == 200


def test_from_the_start_of_a_server_to_its_end(background, model, tmp_path, pool):
    server = Gated(background, model, tmp_path, "serve.max_queue=6", "serve.max_batch=4")
    # The port is open while the model loads.
    assert server.health()["status"] == "loading"
    assert [server.ask("GET", path)[0] for path in ("/ping", "/ready")] == [503, 503]
    assert server.score() == (503, {"error": "the model is being loaded: try again later"})
    assert server.make_ready().health()["status"] == "ready"
    # A model that fails is not the end.
    server.set("broken")
    assert server.score() == (500, {"error": "the model failed: the server's log says why"})
    assert "RuntimeError: broken" in server.started.output()
    # What comes while the model is busy becomes one batch; what the queue cannot hold is refused.
    server.set("closed")
    answers = [pool.submit(server.score)]
    until(lambda: server.health()["batches"] == {"1": 2})  # it is with the model
    answers += [pool.submit(server.score, photo("blue")) for _ in range(5)]
    until(lambda: server.health()["queue"] == 6)
    assert server.score() == (503, {"error": "the queue is full: try again later"})
    server.set()
    assert {answer.result(60)[0] for answer in answers} == {200}
    assert server.health()["batches"] == {"1": 3, "4": 1}
    assert server.health()["queue"] == 0
    # What was accepted is answered at the end.
    server.set("closed")
    answers = [pool.submit(server.score) for _ in range(3)]
    until(lambda: server.health()["queue"] == 3)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: not server.listens())
    assert not futures.wait(answers, timeout=0.5).done
    server.set()
    assert {answer.result(60)[0] for answer in answers} == {200}
    assert server.started.wait() == 0
    assert "ended 9" in server.started.output()


def test_the_token_and_the_time_limit_of_a_request(background, model, tmp_path):
    settings = ("serve.host=0.0.0.0", "serve.token=s3cret", "serve.timeout_s=0.5")
    server = Gated(background, model, tmp_path, *settings).make_ready()
    for sent in ({}, {"Authorization": "Bearer s3creT"}, {"Authorization": "s3cret"}):
        code, content = server.score(**sent)
        assert code == 401
        assert "s3cret" not in str(content)
    assert "s3cret" not in str(server.health())
    assert server.ask("GET", "/ping")[0] == 200
    known = {"Authorization": "Bearer s3cret"}
    server.set("closed")
    for _ in range(2):
        assert server.score(**known) == (504, {"error": "no answer within 0.5 s"})
    with server.connect() as client:
        head = HEAD.replace(b"Host: x", b"Host: x\r\nAuthorization: Bearer s3cret")
        client.sendall(head + b"9\r\n\r\nabc")
        assert b" 408 " in client.recv(1000)
    server.set()
    assert server.score(**known)[0] == 200
    assert server.health()["batches"] == {"1": 2}, "what nobody waits for is not scored"


def test_readiness_is_red_while_all_decoders_hang_and_green_again(
    background, model, tmp_path, pool
):
    server = Gated(background, model, tmp_path, "serve.timeout_s=1").make_ready()
    server.set("hung")
    answers = [pool.submit(server.score) for _ in range(DECODERS + 1)]
    assert {answer.result(60)[0] for answer in answers} == {504}
    until(lambda: server.ask("GET", "/ping")[0] == 503)
    assert server.ask("GET", "/ready")[0] == 503
    assert server.health()["status"] == "stuck"
    server.set()
    until(lambda: server.ask("GET", "/ping")[0] == 200)
    assert server.score()[0] == 200
    assert server.health()["status"] == "ready"
    # It ends although they hang.
    server.set("hung")
    answers = [pool.submit(server.score) for _ in range(DECODERS)]
    until(lambda: server.health()["queue"] == DECODERS)
    server.process.send_signal(signal.SIGTERM)
    assert {answer.result(60)[0] for answer in answers} == {504}
    assert server.started.wait() == 0


@matrix_only
def test_a_second_sigterm_ends_it_at_once(background, model, tmp_path, pool):
    server = Gated(background, model, tmp_path, "serve.timeout_s=600").make_ready()
    server.set("hung")
    pool.submit(server.score)
    until(lambda: server.health()["queue"] == 1)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: not server.listens())
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["serve.max_bach=3"],
            "no such setting [unknown-key]\n      did you mean serve.max_batch?",
        ),
        (["serve.max_batch=many"], "serve.max_batch: 'many' is not an integer"),
        (["serve.max_batch=0"], "serve.max_batch: '0' is not greater than or equal to 1"),
        (["serve.timeout_s=nan"], "serve.timeout_s: 'nan' is not"),
        (["serve.host=::", "serve.token=null"], "serve.token is required"),
        (["serve.token="], "serve.token: '' is not"),
        (["serve.host=192.0.2.1", "serve.no_token=true"], "bind on address ('192.0.2.1', 8080)"),
        (["serve.max_batch=0", "serve.prot=1"], "2 problems"),
    ],
)
def test_refused_settings(command, model, words, message):
    done = command("serve", str(model), *words)
    assert done.code == 2
    assert message in done.err


def test_refused_folders(command, model, tmp_path):
    for name, message in (("nothing", "there is no such folder"), (".", "is not a run")):
        done = command("serve", name)
        assert done.code == 2
        assert f"{name}: {message}" in done.err
    (tmp_path / "weights").mkdir()
    fields = json.loads((model / "model.json").read_text()) | {"kind": "weights"}
    (tmp_path / "weights/model.json").write_text(json.dumps(fields))
    message = "holds weights, which distdl serve does not run"
    assert message in command("serve", "weights").err
    (tmp_path / "weights/model.json").write_text((model / "model.json").read_text())
    done = command("serve", "weights", "serve.port=0")
    assert done.code == 2
    assert "weights cannot be read; export it again" in done.err
    # The model folder in an MLflow model.
    folder = shutil.copytree(model, tmp_path / "artifacts/model")
    assert find_model(tmp_path) == folder
    assert find_model(folder) == folder


@EXPORTED
def test_a_run_is_served_as_it_was_validated(project, background):
    """From a run to answers in one command, with an export if there is none."""
    started = background("serve", RUN, "serve.port=0", cwd=project, module=UNCHECKED)
    started.until(lambda: "stop    " in started.output())
    port = int(started.output().split("serve   http://127.0.0.1:")[1].split()[0])
    server = Server(started.process, port)
    assert "(3 classes)" in started.output()
    assert "images/val/" in started.output()
    images = validation_images(project)
    answers = [server.score(path.read_bytes())[1]["predictions"][0] for path in images]
    validated = status(project / RUN)["metrics"]["val/acc1"]
    assert accuracy(answers, images) == pytest.approx(validated, abs=1e-6)
    started.process.send_signal(signal.SIGINT)
    assert started.wait() == 0
    assert f"done    {len(images)} answered  0 refused" in started.output()
