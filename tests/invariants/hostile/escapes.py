"""A hostile program: runs inside a sandbox and tries the ways out, one by one.

Prints JSON, a name and "refused: why" or what it got hold of. ``TARGETS`` is the only thing that it's told.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import pty
import socket
import sys

TARGETS = json.loads(sys.argv[1])
SECRET = TARGETS["secret"][::-1].encode()
LIBC = ctypes.CDLL(None, use_errno=True)
MACHINE = os.uname().machine
NUMBERS = {
    "x86_64": {"clone": 56, "clone3": 435, "bpf": 321, "perf": 298, "uffd": 323, "uring": 425, "keyctl": 250}
    | {"handle": 304, "module": 313, "kexec": 320, "vm_read": 310, "pivot": 155, "getfd": 438, "fsopen": 430},
    "aarch64": {
        "clone": 220,
        "clone3": 435,
        "bpf": 280,
        "perf": 241,
        "uffd": 282,
        "uring": 425,
        "keyctl": 219,
    }
    | {"handle": 265, "module": 273, "kexec": 294, "vm_read": 270, "pivot": 41, "getfd": 438, "fsopen": 430},
}[MACHINE]
ATTEMPTS = {}


def attempt(function):
    ATTEMPTS[function.__name__] = function
    return function


def read(path):
    with open(path, "rb") as file:
        return file.read()


def must_fail(result):
    """For calls of the C library; a caller that gets through learns what it got."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return f"returned {result}"


def refused_as(number, wanted=errno.EPERM):
    """With arguments that make no sense, so that only the filter can be what says EPERM."""
    LIBC.syscall(*([NUMBERS[number]] + [0] * 6))
    got = ctypes.get_errno()
    if got != wanted:
        return f"reached the kernel: {errno.errorcode.get(got, got)}"
    raise OSError(got, os.strerror(got))


def fate_of(child_does):
    """How a child ends that does it. A signal counts as refused, whichever: a kernel that knows no such calls
    at all sends another one than the filter."""
    child = os.fork()
    if child == 0:
        child_does()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        raise OSError(0, f"killed by signal {os.WTERMSIG(status)}")
    return "went on"


@attempt
def file_of_the_host():
    return read(TARGETS["file"])


@attempt
def file_of_the_host_by_proc_root():
    return read("/proc/1/root" + TARGETS["file"])


@attempt
def installed_package():
    return read(TARGETS["package"])


@attempt
def password_hashes():
    return read("/etc/shadow")


@attempt
def home_of_root():
    return os.listdir("/root")


@attempt
def homes():
    return os.listdir("/home")


@attempt
def host_state_folders():
    found = [
        folder
        for folder in ("/srv", "/mnt", "/sys", "/boot", "/var/lib", "/var/log", "/run")
        if os.path.exists(folder)
    ]
    if not found:
        raise OSError("none")
    return found


@attempt
def host_accounts():
    lines = read("/etc/passwd").decode().splitlines()
    if len(lines) == 1:
        raise OSError("a made-up one")
    return lines


@attempt
def environment_of_the_first_process():
    said = read("/proc/1/environ")
    if not said:
        raise OSError("empty")
    return said.decode()


@attempt
def secret_in_any_environment():
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if SECRET in read(f"/proc/{name}/environ"):
                    return f"in process {name}"
            except OSError:
                pass
    raise OSError("nowhere")


@attempt
def processes_of_the_host():
    seen = [name for name in os.listdir("/proc") if name.isdigit()]
    if len(seen) <= 2:
        raise OSError("only its own")
    return seen


@attempt
def signal_to_the_host():
    os.kill(TARGETS["pid"], 0)
    return "the worker can be signalled"


@attempt
def arguments_of_the_first_process():
    said = read("/proc/1/cmdline").decode()
    if TARGETS["file"].rsplit("/", 1)[0] in said.split("--", 2)[1] or "setenv" in said:
        return said
    raise OSError("tell nothing of the host")


@attempt
def descriptors_of_the_first_process():
    reached = []
    for name in os.listdir("/proc/1/fd"):
        if int(name) > 2:
            try:
                os.close(os.open(f"/proc/1/fd/{name}", os.O_RDONLY))
                reached.append(os.readlink(f"/proc/1/fd/{name}"))
            except OSError:
                pass
    if not reached:
        raise OSError("none can be opened")
    return reached


@attempt
def inherited_descriptors():
    extra = []
    for number in range(3, 1024):
        try:
            os.fstat(number)
        except OSError:
            continue
        extra.append(os.readlink(f"/proc/self/fd/{number}"))
    if not extra:
        raise OSError("none")
    return extra


@attempt
def memory_of_the_first_process():
    with open("/proc/1/maps") as maps:
        writable = [line for line in maps if " rw-p " in line]
    with open("/proc/1/mem", "rb", 0) as memory:
        for line in writable:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            memory.seek(start)
            try:
                if SECRET in memory.read(end - start):
                    return "holds the secret"
            except OSError:
                pass
    raise OSError("holds nothing of the worker")


@attempt
def loopback_port_of_the_host():
    return str(socket.create_connection(("127.0.0.1", TARGETS["port"]), timeout=5))


@attempt
def loopback_port_of_the_host_by_ipv6():
    return str(socket.create_connection(("::1", TARGETS["port"]), timeout=5))


@attempt
def abstract_socket_of_the_host():
    with socket.socket(socket.AF_UNIX) as there:
        there.connect("\0" + TARGETS["abstract"])
    return "connected"


@attempt
def metadata_address():
    return str(socket.create_connection(("169.254.169.254", 80), timeout=5))


@attempt
def network_beyond():
    return str(socket.create_connection(("192.0.2.1", 443), timeout=5))


@attempt
def other_network_interfaces():
    names = [line.split(":")[0].strip() for line in read("/proc/net/dev").decode().splitlines()[2:]]
    if names == ["lo"]:
        raise OSError("loopback only")
    return names


@attempt
def raw_socket():
    return str(socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))


@attempt
def packet_socket():
    return str(socket.socket(socket.AF_PACKET, socket.SOCK_RAW))


@attempt
def netlink_socket():
    return str(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))


@attempt
def vsock_socket():
    return str(socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))


@attempt
def datagram_socket():
    return str(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))


@attempt
def multipath_socket():
    return str(socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262))


@attempt
def ptrace_of_the_first_process():
    return must_fail(LIBC.ptrace(16, 1, 0, 0))


@attempt
def ptrace_of_oneself():
    return must_fail(LIBC.ptrace(0, 0, 0, 0))


@attempt
def process_vm_readv():
    return refused_as("vm_read")


@attempt
def pidfd_getfd():
    return refused_as("getfd")


def namespace(flag):
    return lambda: must_fail(LIBC.unshare(flag))


for _name, _flag in {
    "mount": 0x20000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "time": 0x80,
}.items():
    ATTEMPTS[f"unshare_{_name}_namespace"] = namespace(_flag)


@attempt
def clone_with_a_user_namespace():
    child = LIBC.syscall(NUMBERS["clone"], 0x10000000 | 17, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    return must_fail(child)


@attempt
def clone3():
    return refused_as("clone3", errno.ENOSYS)


@attempt
def setns():
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        return must_fail(LIBC.setns(own, 0))
    finally:
        os.close(own)


@attempt
def mount_tmpfs():
    return must_fail(LIBC.mount(b"none", b"/tmp", b"tmpfs", 0, None))


@attempt
def remount_root_writable():
    return must_fail(LIBC.mount(None, b"/", None, 0x20, None))


@attempt
def umount_proc():
    return must_fail(LIBC.umount2(b"/proc", 2))


@attempt
def new_mount_interface():
    return refused_as("fsopen")


@attempt
def pivot_root():
    return refused_as("pivot")


@attempt
def chroot():
    os.chroot("/tmp")
    return "done"


@attempt
def device_node():
    os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0))
    return "made"


@attempt
def root_by_setuid():
    os.setresuid(0, 0, 0)
    return "is root"


@attempt
def capabilities():
    said = [line for line in read("/proc/self/status").decode().splitlines() if line.startswith("Cap")]
    if all(line.split()[1].strip("0") == "" for line in said):
        raise OSError("none")
    return said


@attempt
def new_privileges():
    if "NoNewPrivs:\t1" in read("/proc/self/status").decode():
        raise OSError("never")
    return "possible"


def writing(path):
    def write():
        with open(path, "w") as file:
            file.write("x")
        return "written"

    return write


for _name, _path in {
    "root": "/x",
    "code": "/var/task/x",
    "runtime": "/opt/x",
    "usr": "/usr/x",
    "etc": "/etc/x",
    "own_passwd": "/etc/passwd",
    "dev": "/dev/x",
    "proc_sys": "/proc/sys/kernel/hostname",
    "core_pattern": "/proc/sys/kernel/core_pattern",
    "sysrq": "/proc/sysrq-trigger",
}.items():
    ATTEMPTS[f"write_{_name}"] = writing(_path)


@attempt
def chmod_of_the_code():
    os.chmod("/var/task", 0o777)
    return "done"


@attempt
def typing_into_a_terminal():
    _, terminal = pty.openpty()
    fcntl.ioctl(terminal, 0x5412, b"x")
    return "typed"


@attempt
def bpf():
    return refused_as("bpf")


@attempt
def perf_event_open():
    return refused_as("perf")


@attempt
def userfaultfd():
    return refused_as("uffd")


@attempt
def io_uring():
    return refused_as("uring")


@attempt
def keyring():
    return refused_as("keyctl")


@attempt
def open_by_handle():
    return refused_as("handle")


@attempt
def kernel_module():
    return refused_as("module")


@attempt
def kexec():
    return refused_as("kexec")


@attempt
def call_that_is_newer_than_the_filter():
    LIBC.syscall(1000)
    if ctypes.get_errno() != errno.ENOSYS:
        return "known"
    raise OSError("unknown")


@attempt
def x32_calls():
    if MACHINE != "x86_64":
        raise OSError("no such thing here")
    return fate_of(lambda: LIBC.syscall(0x40000000 | 39))


@attempt
def calls_of_32_bit():
    if MACHINE != "x86_64":
        raise OSError("no such thing here")

    def child():
        code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
        code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
        address = ctypes.addressof(ctypes.c_char.from_buffer(code))
        ctypes.CFUNCTYPE(ctypes.c_int)(address)()

    return fate_of(child)


def main():
    outcomes = {}
    for name, function in ATTEMPTS.items():
        try:
            outcomes[name] = f"succeeded: {function()}"
        except (OSError, ValueError) as error:
            outcomes[name] = f"refused: {error}"
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main()
