"""Speak and recognize speech over HTTP, on the CPU and offline: a real engine beside llama.cpp, for tests.

    python speech_server.py voice|ears --port N [--host ADDRESS] [--delay SECONDS]

`voice` answers POST /v1/audio/speech with the WAV of eSpeak NG (`espeakng-loader`), `ears` answers
POST /v1/audio/transcriptions with the text that PocketSphinx and its own English model hear (`pocketsphinx`). Both
answer 503 to GET /health until their models are loaded.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import io
import json
import threading
import time
import wave
from collections.abc import Callable
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RATE = 16000
Answer = tuple[str, bytes]


def load_voice() -> Callable[[bytes, str], Answer]:
    import espeakng_loader  # type: ignore[import-not-found]

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    # AUDIO_OUTPUT_SYNCHRONOUS of speak_lib.h: espeak_Synth returns when the callback had every sample.
    rate = library.espeak_Initialize(2, 0, espeakng_loader.get_data_path().encode(), 0)
    library.espeak_SetVoiceByName(b"en-us")
    library.espeak_SetParameter(1, 120, 0)  # espeakRATE, words a minute
    heard = bytearray()

    def samples(start: Any, count: int, _: Any) -> int:
        if start and count > 0:
            heard.extend(ctypes.string_at(start, count * 2))
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)(samples)
    library.espeak_SetSynthCallback(callback)
    lock = threading.Lock()

    def speak(body: bytes, _: str) -> Answer:
        text = json.loads(body)["input"].encode() + b"\0"
        with lock:
            heard.clear()
            library.espeak_Synth(text, ctypes.c_size_t(len(text)), 0, 0, 0, 1, None, None)
            return "audio/wav", _wav(array.array("h", bytes(heard)), rate)

    speak.keep = callback  # type: ignore[attr-defined]
    return speak


def _wav(samples: array.array[int], rate: int) -> bytes:
    """Return a WAV of 16 kHz, with a quarter of a second of silence at each end."""
    count = len(samples) * RATE // rate
    silence = bytes(RATE // 2)
    thinned = array.array("h", (samples[min(len(samples) - 1, i * rate // RATE)] for i in range(count)))
    written = io.BytesIO()
    with wave.open(written, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(silence + thinned.tobytes() + silence)
    return written.getvalue()


def load_ears() -> Callable[[bytes, str], Answer]:
    from pocketsphinx import Decoder  # type: ignore[import-not-found]

    decoder = Decoder(samprate=RATE, loglevel="ERROR")
    lock = threading.Lock()

    def hear(body: bytes, kind: str) -> Answer:
        form = message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body)
        file = next(part for part in form.walk() if part.get_filename())
        with lock, wave.open(io.BytesIO(file.get_payload(decode=True))) as sound:  # type: ignore[arg-type]
            decoder.start_utt()
            decoder.process_raw(sound.readframes(sound.getnframes()), full_utt=True)
            decoder.end_utt()
            found = decoder.hyp()
        return "application/json", json.dumps({"text": found.hypstr if found else ""}).encode()

    return hear


LOADERS = {"voice": ("/v1/audio/speech", load_voice), "ears": ("/v1/audio/transcriptions", load_ears)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=LOADERS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--delay", type=float, default=0.0)
    chosen = parser.parse_args()
    path, loader = LOADERS[chosen.part]
    answer: list[Callable[[bytes, str], Answer]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200 if answer else 503, "text/plain", b"ok" if answer else b"loading")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != path or not answer:
                self._send(404 if answer else 503, "text/plain", b"no")
            else:
                self._send(200, *answer[0](body, self.headers.get("Content-Type", "")))

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer((chosen.host, chosen.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"loading {chosen.part}", flush=True)
    time.sleep(chosen.delay)
    answer.append(loader())
    print(f"{chosen.part} serves {path}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
