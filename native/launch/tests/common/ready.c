// The smallest program that answers on its channel and waits to be killed: no libc, so that starting it costs next to
// nothing. Its first descriptor is the channel.
static long call(long n, long a, long b, long c, long d, long e, long f) {
    long r;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return r;
}
void _start(void) {
    static const char ready[] = "ready";
    call(44, 3, (long)ready, 5, 0, 0, 0);
    for (;;) call(34, 0, 0, 0, 0, 0, 0);
}
