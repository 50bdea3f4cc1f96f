"""An agent that misbehaves at random, in another way at each try."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from urllib.parse import urlsplit

URL = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
KEY = "Bearer " + os.environ["OPENAI_API_KEY"]
draw = random.Random(os.urandom(8))
messages = json.load(sys.stdin)["prompt"]


def post(body: dict) -> dict:
    headers = {"authorization": KEY, "content-type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(URL, json.dumps(body).encode(), headers)))


def chat() -> None:
    messages.append(post({"model": "m", "messages": messages})["choices"][0]["message"])
    messages.append({"role": "user", "content": "again"})


def die() -> None:
    chat()
    os.kill(os.getpid(), draw.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))


def hang() -> None:
    chat()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def double() -> None:
    threads = [threading.Thread(target=post, args=({"model": "m", "messages": list(messages)},)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def close_stream(share: float = 1.0) -> None:
    """Send a request, or the beginning of one, and close the connection before the answer."""
    parts = urlsplit(URL)
    body = json.dumps({"model": "m", "messages": messages, "stream": True})
    head = f"POST {parts.path} HTTP/1.1\r\nhost: a\r\nauthorization: {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    data = (head + body).encode()
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(data[: int(share * len(data))])
        time.sleep(draw.uniform(0, 0.02))


def leave_child() -> None:
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleep, start_new_session=draw.random() < 0.5)


def send_nonsense() -> None:
    for body in ({}, {"messages": []}, {"messages": [{"role": "user", "content": 1}]}, {"messages": messages, "n": 9}):
        try:
            post(body)
        except urllib.error.HTTPError as error:
            assert error.code == 400
        else:
            sys.exit("nonsense was accepted")


def print_much() -> None:
    print("x" * 5_000_000)


ways = [die, double, close_stream, lambda: close_stream(0.9), leave_child, send_nonsense, print_much]
if draw.random() < 0.03:
    hang()
chat()
for _ in range(2):
    if draw.random() < 0.4:
        draw.choice(ways)()
chat()
