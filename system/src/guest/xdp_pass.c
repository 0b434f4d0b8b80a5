/* Attaches a program that passes every frame to an interface, natively, and stays: the program goes
   with the process. Says "attached", or why not. */
#include <errno.h>
#include <linux/bpf.h>
#include <linux/if_link.h>
#include <net/if.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static long bpf(int command, union bpf_attr *attr)
{
    return syscall(SYS_bpf, command, attr, sizeof(*attr));
}

static int refused(const char *what)
{
    printf("%s: %s\n", what, strerror(errno));
    return 1;
}

int main(int count, char **words)
{
    /* r0 = XDP_PASS; exit */
    struct bpf_insn program[] = {
        { .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_0, .imm = XDP_PASS },
        { .code = BPF_JMP | BPF_EXIT },
    };
    union bpf_attr load = {
        .prog_type = BPF_PROG_TYPE_XDP,
        .insns = (uintptr_t)program,
        .insn_cnt = 2,
        .license = (uintptr_t)"GPL",
    };
    union bpf_attr attach = { .link_create = { .attach_type = BPF_XDP } };
    long loaded = bpf(BPF_PROG_LOAD, &load);

    setvbuf(stdout, NULL, _IONBF, 0);
    if (loaded < 0)
        return refused("load");
    attach.link_create.prog_fd = loaded;
    attach.link_create.target_ifindex = if_nametoindex(count > 1 ? words[1] : "");
    attach.link_create.flags = XDP_FLAGS_DRV_MODE;
    if (bpf(BPF_LINK_CREATE, &attach) < 0)
        return refused("attach");
    puts("attached");
    for (;;)
        pause();
}
