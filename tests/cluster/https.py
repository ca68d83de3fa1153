"""An https server on loopback whose answers are exceptions: `raise Answer(404, {...})`."""

import json
import threading


class Answer(Exception):
    """Ends the handling of a request: a status, a body, headers."""

    def __init__(self, status, body=None, **headers):
        self.status = status
        self.body = body
        self.headers = headers


def error(status, code, message, **headers):
    """An error as Azure words it."""
    return Answer(status, {"error": {"code": code, "message": message}}, **headers)


def serve(service, certificate, key):
    """Starts a server on a free port. Returns its address, and a function that ends it.

    `service.answer` raises its answer, an `Answer`. `service.requests` gets the method, the path
    and the body of each request.
    """
    from werkzeug import Request, Response  # moto brings it
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # a connection serves many requests
        wbufsize = -1  # head and body in one packet, else each answer waits 40 ms for an ACK

        def log(self, *_):
            pass

    @Request.application
    def application(request):
        body = request.get_data(as_text=True)
        service.requests.append((request.method, request.path, body))
        given = json.loads(body) if body.strip() else None
        query = request.query_string.decode()
        try:
            service.answer(request.method, request.path, given, request.headers, query)
        except Exception as raised:  # of the stand-in: seen in the SDK's message
            answer = raised if isinstance(raised, Answer) else error(500, "StandIn", repr(raised))
        content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body)
        return Response(content, answer.status, answer.headers, content_type="application/json")

    server = make_server(
        "127.0.0.1",
        0,
        application,
        request_handler=Handler,
        ssl_context=(str(certificate), str(key)),
        threaded=True,
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"https://127.0.0.1:{server.server_port}", server.shutdown
