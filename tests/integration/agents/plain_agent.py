"""An agent without any library: two turns, a sub-agent in parallel (messages API), and a compacted history."""

import json
import os
import sys
import threading
import urllib.request


def post(url: str, body: dict) -> dict:
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))


def chat(messages: list) -> dict:
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, {"model": "m", "messages": messages})["choices"][0]["message"]


def delegate(text: str) -> None:
    body = {"model": "m", "max_tokens": 100, "system": "Help.", "messages": [{"role": "user", "content": text}]}
    found.append(post(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body)["content"][0]["text"])


found: list = []
messages = json.load(sys.stdin)["prompt"]
helper = threading.Thread(target=delegate, args=(messages[0]["content"],))
helper.start()
messages.append(chat(messages))
messages.append({"role": "user", "content": "again"})
messages.append(chat(messages))
helper.join()
chat([{"role": "user", "content": "In short: " + found[0][:3]}])
