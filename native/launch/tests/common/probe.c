// The program that the launcher's tests run in sandboxes. Answers one request packet at a time on its channel:
//   s<cmd>  run a shell command as the sandbox's root (in its user namespace); answer: its output
//   a<cmd>  run a shell command as the agent itself
//   t       connect to a listener on loopback and close the active side first, so that a TIME_WAIT stays
//   k       put a key into the user keyring of the sandbox's root
//   K       look for that key; answers "found" or "none"
//   m       touch 256 MiB as a child of the sandbox, answers the child's wait status
//   e<n>    exit with status n
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int channel = -1, userns = -1;
static char request[65536], answer[60000];

static void become_root(void) {
    if (userns >= 0 && setns(userns, CLONE_NEWUSER)) _exit(91);
    if (userns >= 0 && (syscall(SYS_setgroups, 0, 0) || setresgid(0, 0, 0) || setresuid(0, 0, 0))) _exit(92);
}

static void run(const char *command, int root) {
    int p[2];
    if (pipe2(p, 0)) exit(90);
    pid_t pid = fork();
    if (!pid) {
        dup2(p[1], 1), dup2(p[1], 2), close(p[0]), close(p[1]);
        if (root) become_root();
        execl("/bin/sh", "sh", "-c", command, NULL);
        _exit(93);
    }
    close(p[1]);
    size_t n = 0;
    ssize_t got;
    while ((got = read(p[0], answer + n, sizeof answer - n - 32)) > 0) n += got;
    close(p[0]);
    int status;
    waitpid(pid, &status, 0);
    n += sprintf(answer + n, "[%d]", status);
    send(channel, answer, n, 0);
}

static void time_wait(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(4242), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int l = socket(AF_INET, SOCK_STREAM, 0), c = socket(AF_INET, SOCK_STREAM, 0), s;
    if (bind(l, (void *)&a, sizeof a) || listen(l, 1) || connect(c, (void *)&a, sizeof a)) exit(94);
    s = accept(l, NULL, NULL);
    close(c), close(s), close(l);
    send(channel, "done", 4, 0);
}

static void keys(int look) {
    int p[2];
    if (pipe2(p, 0)) exit(90);
    if (!fork()) {
        become_root();
        long k = look ? syscall(SYS_keyctl, 10, -4, "user", "tenant", 0)
                      : syscall(SYS_add_key, "user", "tenant", "secret", 6, -4);
        (void)!write(p[1], k >= 0 ? "found" : "none", k >= 0 ? 5 : 4);
        _exit(0);
    }
    close(p[1]);
    ssize_t n = read(p[0], answer, 16);
    close(p[0]);
    wait(NULL);
    send(channel, answer, n < 0 ? 0 : n, 0);
}

static void memory(void) {
    if (!fork()) {
        char *m = mmap(0, 256 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (long i = 0; i < 256 << 20; i += 4096) m[i] = 1;
        _exit(0);
    }
    int status, n;
    wait(&status);
    n = sprintf(answer, "%d", status);
    send(channel, answer, n, 0);
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        sscanf(argv[i], "channel=%d", &channel);
        sscanf(argv[i], "userns=%d", &userns);
        if (!strcmp(argv[i], "mute")) pause();
        if (!strncmp(argv[i], "exit=", 5)) return atoi(argv[i] + 5);
    }
    prctl(PR_SET_DUMPABLE, 0);
    char first[64] = "";
    ssize_t n = recv(channel, first, sizeof first - 1, MSG_DONTWAIT);
    int m = sprintf(answer, "ready %.*s argc=%d", (int)(n > 0 ? n : 0), first, argc);
    for (int i = 0; i < argc; i++) m += sprintf(answer + m, " %s", argv[i]);
    send(channel, answer, m, 0);
    while ((n = recv(channel, request, sizeof request - 1, 0)) > 0) {
        request[n] = 0;
        switch (request[0]) {
        case 's': run(request + 1, 1); break;
        case 'a': run(request + 1, 0); break;
        case 't': time_wait(); break;
        case 'k': keys(0); break;
        case 'K': keys(1); break;
        case 'm': memory(); break;
        case 'e': exit(atoi(request + 1));
        }
    }
    return 0;
}
