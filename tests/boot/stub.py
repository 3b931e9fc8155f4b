"""Stands in for edgellm where its Python is too old: speaks systemd's protocols, answers with its pid. Python 3.5."""

import http.server
import os
import socket
import threading
import time


def notify(text):
    address = os.environ["NOTIFY_SOCKET"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect("\0" + address[1:] if address[0] == "@" else address)
        out.sendall(text.encode())


def feed():
    while True:
        notify("WATCHDOG=1")
        time.sleep(int(os.environ["WATCHDOG_USEC"]) / 4e6)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = str(os.getpid()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket.close()
server.socket = socket.socket(fileno=3)
time.sleep(2)  # a model loads
threading.Thread(target=feed, daemon=True).start()
notify("READY=1\nSTATUS=stub")
server.serve_forever()
