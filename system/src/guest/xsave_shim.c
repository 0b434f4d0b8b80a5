/* Preloaded into User Mode Linux older than 6.13 on CPUs with AMX.
 *
 * That UML hands PTRACE_SETREGSET(NT_X86_XSTATE) a buffer of fixed size. Where the CPU's save
 * area is larger (AMX tiles: 11 KiB) the kernel refuses the short buffer with EFAULT. Here the
 * whole area is read first, the short buffer laid over its start, and the states beyond it are
 * not claimed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef NT_X86_XSTATE
#define NT_X86_XSTATE 0x202
#endif

/* x87, SSE, AVX, MPX, AVX-512 (bits 0-7) and protection keys (bit 9) lie below the tiles. */
#define STATES_KEPT (0xffull | 1ull << 9)
#define XSTATE_BV_OFFSET 512

static long set_xstate(pid_t pid, void *type, struct iovec *given)
{
	static char area[65536] __attribute__((aligned(64)));
	struct iovec whole = { area, sizeof(area) };
	unsigned long long states;

	if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, type, &whole) != 0 ||
	    whole.iov_len <= given->iov_len)
		return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, type, given);
	memcpy(area, given->iov_base, given->iov_len);
	memcpy(&states, area + XSTATE_BV_OFFSET, sizeof(states));
	states &= STATES_KEPT;
	memcpy(area + XSTATE_BV_OFFSET, &states, sizeof(states));
	return syscall(SYS_ptrace, PTRACE_SETREGSET, pid, type, &whole);
}

long ptrace(enum __ptrace_request request, ...)
{
	va_list arguments;
	pid_t pid;
	void *address, *data;
	long result, peeked;
	int peeks = request > 0 && request < 4; /* glibc returns what the kernel stores */

	va_start(arguments, request);
	pid = va_arg(arguments, pid_t);
	address = va_arg(arguments, void *);
	data = va_arg(arguments, void *);
	va_end(arguments);
	if ((int)request == PTRACE_SETREGSET && (unsigned long)address == NT_X86_XSTATE)
		return set_xstate(pid, address, data);
	result = syscall(SYS_ptrace, request, pid, address, peeks ? &peeked : data);
	if (peeks && result >= 0) {
		errno = 0;
		return peeked;
	}
	return result;
}
