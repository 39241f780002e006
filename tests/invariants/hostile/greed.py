"""A greedy program: runs inside a sandbox and takes more than it may, in the way that its first argument names."""

import mmap
import os
import sys
import threading
import time

MIB = 1024 * 1024


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def fork_bomb():
    """Doubles for as long as it can, and stays."""
    while True:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)


def threads():
    started = 0
    try:
        while True:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            started += 1
    except RuntimeError:
        say(started)
        os._exit(0)


def memory():
    held = []
    while True:
        held.append(bytearray(16 * MIB))


def memory_of_many():
    for _ in range(8):
        if os.fork() == 0:
            break
    memory()


def shared_memory():
    held = []
    while True:
        piece = mmap.mmap(-1, 16 * MIB, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        piece.write(b"x" * 16 * MIB)
        held.append(piece)


def memory_files():
    held = []
    while True:
        held.append(os.memfd_create("hog"))
        for _ in range(16):
            os.write(held[-1], b"x" * MIB)


def endless_loop():
    while True:
        pass


def cpu_time():
    endless_loop()


def fill(folder):
    written = 0
    try:
        for number in range(1000):
            with open(f"{folder}/{number}", "wb", 0) as file:
                for _ in range(4):
                    written += file.write(b"x" * MIB)
    except OSError as error:
        say(written, error.strerror)


def fill_tmp():
    fill("/tmp")


def fill_shared_memory_folder():
    fill("/dev/shm")


def large_file():
    try:
        with open("/tmp/large", "wb", 0) as file:
            for _ in range(1000):
                file.write(b"x" * MIB)
    except OSError as error:
        say(os.path.getsize("/tmp/large"), error.strerror)


def descriptors():
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        say(len(held), error.strerror)


def child_left_behind():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(1)
            os.close(2)
            sleep_on()
        os._exit(0)
    os.wait()


def sleep_on():
    while True:
        time.sleep(1)


def talk():
    """More than anyone wants to hear, and never an end."""
    while True:
        os.write(1, b"x" * MIB)


if __name__ == "__main__":
    {name: value for name, value in globals().items() if callable(value)}[sys.argv[1]]()
