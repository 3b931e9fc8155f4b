"""A ROS 2 node that answers prompts with edgellm: subscribes to /prompt, publishes /answer_part and /answer.

    python3 ros2_chat_node.py --ros-args -p url:=http://127.0.0.1:8080/v1 -p model:=chat

`answer_parts` is the HTTP part; it needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator


class ServerError(Exception):
    """The server reported an error, or ended an answer before its end."""


def answer_parts(
    url: str, prompt: str, *, model: str = "chat", key: str = "", system: str = "", max_tokens: int = 256
) -> Iterator[str]:
    """Yield the pieces of an answer as they are generated. Raises ServerError, or OSError while nothing listens.

    A model that is still loading holds the request; lines that start with a colon are its signs of life.
    """
    messages = [{"role": "system", "content": system}] if system else []
    body = {
        "model": model,
        "messages": [*messages, {"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "stream": True,
    }
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if not data or data.startswith((":", "event:")):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(event["error"].get("message", "unknown error"))
                for choice in event.get("choices", []):
                    if text := choice.get("delta", {}).get("content"):
                        yield text
    except urllib.error.HTTPError as error:
        document = json.loads(error.read() or b"{}")
        raise ServerError(f"{error.code}: {document.get('error', {}).get('message', error.reason)}") from error
    raise ServerError("the answer ended before its end")


def main() -> None:
    """Run the node until it is shut down."""
    import rclpy
    from rclpy.node import Node
    from std_msgs.msg import String

    class ChatNode(Node):
        """One prompt at a time, in their order; a thread of its own, so that callbacks never wait for the model."""

        def __init__(self) -> None:
            super().__init__("edgellm_chat")
            self._url = self.declare_parameter("url", "http://127.0.0.1:8080/v1").value
            self._model = self.declare_parameter("model", "chat").value
            self._system = self.declare_parameter("system", "You are the voice of a robot. Be brief.").value
            self._parts = self.create_publisher(String, "answer_part", 50)
            self._answers = self.create_publisher(String, "answer", 10)
            self._prompts: queue.Queue[str] = queue.Queue(maxsize=8)
            self.create_subscription(String, "prompt", self._accept, 10)
            threading.Thread(target=self._work, daemon=True).start()

        def _accept(self, message: String) -> None:
            try:
                self._prompts.put_nowait(message.data)
            except queue.Full:
                self.get_logger().warning("eight prompts wait already: this one is dropped")

        def _work(self) -> None:
            while True:
                prompt, text = self._prompts.get(), ""
                try:
                    # The key is in the environment: parameters can be read by every node.
                    key = os.environ.get("EDGELLM_API_KEY", "")
                    for part in answer_parts(self._url, prompt, model=self._model, key=key, system=self._system):
                        text += part
                        self._parts.publish(String(data=part))
                    self._answers.publish(String(data=text))
                except (ServerError, OSError) as error:
                    self.get_logger().error(f"no answer: {error}")

    rclpy.init()
    node = ChatNode()
    try:
        rclpy.spin(node)
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


if __name__ == "__main__":
    main()
