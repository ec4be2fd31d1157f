# Runs on the far side, first: unpacks what was sent into a private folder, runs the command, removes the folder.
# Any Python 3 must be able to read it, so that one that is too old can be told from none at all: hence no annotations.
# mypy: ignore-errors
import os
import sys


def main(header, data):
    out = os.fdopen(1, "wb", 0)
    mark = ("\0specmeter " + header["token"] + " ").encode()
    # On both streams, for what a login shell prints comes on both, and they do not keep step.
    os.write(2, mark + b"start\n")
    out.write(mark + b"start\n")
    code = 5
    try:
        if sys.version_info < (3, 9):
            version = ".".join(str(part) for part in sys.version_info[:3])
            step = "at least 3.9 is needed. Name another with --far-python."
            say("%s there is Python %s: %s" % (header["python"], version, step))
        else:
            code = run_in_folder(header, data)
    finally:
        out.write(mark + ("end %d\n" % code).encode())


def run_in_folder(header, data):
    import shutil
    import tempfile

    folder = None
    try:
        try:
            folder = tempfile.mkdtemp(prefix="specmeter-far-")  # 0700
            unpack(folder, data)
        except OSError as error:
            say("no private folder can be made there: %s. Make room, or set TMPDIR there." % error)
            return 5
        return run_command(header, folder)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def unpack(folder, data):
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(folder)


def run_command(header, folder):
    import signal
    import subprocess
    import threading

    relay = header.get("relay")
    call = "from specmeter.cli import main; sys.exit(main(sys.argv[1:]))"
    if relay:
        call = "from specmeter.hosts.far_relay import main; sys.exit(main())"
    code = "import sys; sys.path[0] = sys.argv.pop(1); sys.argv[0] = 'specmeter'; " + call
    words = [sys.executable, "-B", "-c", code, folder] + header["arguments"]
    # A relay reads the stream itself, and ends with it.
    child = subprocess.Popen(words, stdin=None if relay else subprocess.DEVNULL)

    def watch():
        # Nothing more is sent: the end of the stream is the end of the connection, or of the one who asked.
        while os.read(0, 4096):
            pass
        stop()

    def stop():
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()

    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        # In a thread: the handler interrupts the wait below, so it would not see the child's end.
        signal.signal(number, lambda *_: threading.Thread(target=stop, daemon=True).start())
    if not relay:
        threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def say(text):
    sys.stderr.write("specmeter: " + text + "\n")
    sys.stderr.flush()
