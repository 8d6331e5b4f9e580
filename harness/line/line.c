// Lines from this network namespace to others: packets go through a queue, a rate, a delay and losses each way (way.h).
//
//     line LINES FIRST_ADDRESS SEED
//
// creates LINES network namespaces with a TUN device `line` in each, and one TUN device `linesN` in this namespace, and
// routes between them. Behind each line is one address: LINES consecutive ones, the first one FIRST_ADDRESS + N × 256
// (N as in `linesN`). All other addresses are here. A packet between two lines goes up one and down the other; packets
// that are not IPv4 are dropped. The namespaces have no name: they end with this process and those that run in them.
// This process ends when its stdin or its parent does.
//
// It prints the name of the device here and a file descriptor per namespace, for `nsenter --net=/proc/PID/fd/N`. Then
// it reads orders from stdin and answers each, one line each:
//
//     set LINE up|down BITS_PER_SECOND DELAY_NS QUEUE_BYTES LOSS      (loss: 0 to 1)  ->  "done"
//     count LINE      ->  packets and bytes passed, lost and dropped up, and the same six down

#define _GNU_SOURCE
#include "card.h"
#include "way.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX_LINES 200
// Packets are handled when they arrive, but at most this often, as waking up for each one would be most of the work. So
// a packet may be delayed by this much when it enters and when it leaves.
#define TICK_NS 100000
#define ORDER_BYTES 256

static struct line {
    int tun;
    struct way up, down;
} lines[MAX_LINES];
static int count, tun;  // number of lines; the device here
static uint32_t first_address;
static struct packet *spare;

static void fail(const char *what) {
    perror(what);
    _exit(1);  // part of a line on stdout would be misread
}

static uint64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * UINT64_C(1000000000) + t.tv_nsec;
}

static struct packet *new_packet(void) {
    struct packet *packet = spare;
    if (packet == NULL) {
        if ((packet = malloc(sizeof *packet)) == NULL) fail("malloc");
    } else {
        spare = packet->next;
    }
    return packet;
}

static void discard(struct packet *packet) {
    packet->next = spare;
    spare = packet;
}

static int open_tun(char *name) {
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) fail("/dev/net/tun");
    if (ioctl(fd, TUNSETIFF, &request)) fail("TUNSETIFF");
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) fail("TUNSETOFFLOAD");
    strcpy(name, request.ifr_name);
    return fd;
}

static int this_namespace(void) {
    int fd = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("/proc/self/ns/net");
    return fd;
}

// The line with this address at its remote end; NULL for all other addresses, which are here.
static struct line *line_to(const struct packet *packet) {
    uint32_t to;
    memcpy(&to, packet->bytes + 16, sizeof to);
    uint32_t index = ntohl(to) - first_address;
    return index < (uint32_t)count ? &lines[index] : NULL;
}

static void enter(struct way *way, struct packet *packet, uint64_t now) {
    if (!way_enter(way, packet, now)) discard(packet);
}

// Read the packets that a device sends; `line` is NULL for the device here.
static void take(int fd, struct line *line) {
    static struct frame frame;
    ssize_t size;
    while ((size = read(fd, &frame, sizeof frame)) > 0) {
        uint64_t now = clock_ns();  // after reading, so that no packet is early
        struct cut cut = cut_begin(&frame, size);
        for (struct packet *packet; cut.left > 0; ) {
            cut_next(&cut, packet = new_packet());
            struct line *to = line_to(packet);
            if (line != NULL) enter(&line->up, packet, now);
            else if (to != NULL) enter(&to->down, packet, now);
            else discard(packet);
        }
    }
    if (size < 0 && errno != EAGAIN) fail("read");
}

static void deliver(struct joint *joint, int fd) {
    if (joint->count == 0) return;
    int parts = joint_parts(joint);
    if (writev(fd, joint->parts, parts) < 0) fail("write");
    while (joint->count > 0) discard(joint->packets[--joint->count]);
}

// Deliver the packets that arrived in one direction. A packet for another line enters that line's down direction.
static void empty(struct way *way, int fd, bool goes_on, uint64_t now) {
    static struct joint joint;
    struct packet *packet;
    struct line *to;
    bool lost;
    while ((packet = way_leave(way, now, &lost)) != NULL) {
        if (lost) {
            discard(packet);
        } else if (goes_on && (to = line_to(packet)) != NULL) {
            enter(&to->down, packet, packet->at);
        } else {
            if (!joins(&joint, packet)) deliver(&joint, fd);
            joint.packets[joint.count++] = packet;
        }
    }
    deliver(&joint, fd);
}

// Deliver all packets that have arrived. Return when the next one arrives.
static uint64_t give(uint64_t now) {
    uint64_t next = NEVER, at;
    for (struct line *line = lines; line < lines + count; line++) empty(&line->up, tun, true, now);
    for (struct line *line = lines; line < lines + count; line++) {
        empty(&line->down, line->tun, false, now);
        if ((at = way_next(&line->up)) < next) next = at;
        if ((at = way_next(&line->down)) < next) next = at;
    }
    return next;
}

static void tell(struct way *way, const char *end) {
    struct count *counts[] = {&way->passed, &way->lost, &way->dropped};
    for (int i = 0; i < 3; i++)
        printf("%" PRIu64 " %" PRIu64 "%s", counts[i]->packets, counts[i]->bytes, i < 2 ? " " : end);
}

static void obey(const char *order) {
    char direction[5];
    int index;
    double rate, loss;
    uint64_t delay, queue;
    bool set = sscanf(order, "set %d %4s %lf %" SCNu64 " %" SCNu64 " %lf", &index, direction, &rate, &delay, &queue,
                      &loss) == 6;
    if ((!set && sscanf(order, "count %d", &index) != 1) || index < 0 || index >= count) {
        fprintf(stderr, "line: no such order: %s\n", order);
        exit(2);
    }
    if (set) {
        way_set(strcmp(direction, "up") ? &lines[index].down : &lines[index].up, clock_ns(), rate, delay, queue, loss);
        puts("done");
    } else {
        tell(&lines[index].up, " ");
        tell(&lines[index].down, "\n");
    }
    fflush(stdout);
}

// Read stdin and execute its complete lines.
static void listen_to_orders(void) {
    static char text[ORDER_BYTES];
    static size_t have;
    ssize_t size = read(0, text + have, sizeof text - have);
    if (size < 0) fail("stdin");
    if (size == 0) exit(0);
    have += size;
    char *end;
    while ((end = memchr(text, '\n', have)) != NULL) {
        *end = '\0';
        obey(text);
        have -= end + 1 - text;
        memmove(text, end + 1, have);
    }
    if (have == sizeof text) {
        fprintf(stderr, "line: an order is too long\n");
        exit(2);
    }
}

static void run(void) {
    struct pollfd ends[MAX_LINES + 2] = {{.fd = 0, .events = POLLIN}, {.fd = tun, .events = POLLIN}};
    for (int i = 0; i < count; i++) ends[i + 2] = (struct pollfd){.fd = lines[i].tun, .events = POLLIN};
    for (;;) {
        if (ends[0].revents) listen_to_orders();
        if (ends[1].revents) take(tun, NULL);
        for (int i = 0; i < count; i++)
            if (ends[i + 2].revents) take(lines[i].tun, &lines[i]);
        uint64_t next = give(clock_ns()), now = clock_ns();
        uint64_t wait = next <= now + TICK_NS ? TICK_NS : next == NEVER ? NEVER : next - now;
        // First a short sleep, in which packets gather; the whole wait, if it is not much longer.
        uint64_t rest = wait < 2 * TICK_NS ? wait : TICK_NS;
        nanosleep(&(struct timespec){.tv_nsec = rest}, NULL);
        struct timespec more = {.tv_sec = (wait - rest) / 1000000000, .tv_nsec = (wait - rest) % 1000000000};
        if (ppoll(ends, count + 2, wait == NEVER ? NULL : &more, NULL) < 0 && errno != EINTR) fail("poll");
    }
}

int main(int argc, char **argv) {
    struct in_addr first;
    if (argc != 4 || (count = atoi(argv[1])) < 1 || count > MAX_LINES || !inet_aton(argv[2], &first)) {
        fprintf(stderr, "usage: line LINES FIRST_ADDRESS SEED\n");
        return 2;
    }
    first_address = ntohl(first.s_addr);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("prctl");
    signal(SIGINT, SIG_IGN);  // Ctrl-C is for the processes that use the lines, which end this one
    if (prctl(PR_SET_TIMERSLACK, 1)) fail("prctl");
    // Real-time priority, so that the line does not wait for the processes at its ends; a container may forbid it.
    struct sched_param first_of_all = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_RR, &first_of_all) && errno != EPERM) fail("sched_setscheduler");
    char here[IFNAMSIZ] = "lines%d", far[IFNAMSIZ];
    tun = open_tun(here);
    first_address += (uint32_t)atoi(here + strlen("lines")) << 8;
    int home = this_namespace();
    printf("%s", here);
    for (int i = 0; i < count; i++) {
        if (unshare(CLONE_NEWNET)) fail("unshare");
        strcpy(far, "line");
        lines[i].tun = open_tun(far);
        lines[i].up.chance = strtoull(argv[3], NULL, 10) + 2 * i;
        lines[i].down.chance = lines[i].up.chance + 1;
        printf(" %d", this_namespace());
    }
    if (setns(home, CLONE_NEWNET)) fail("setns");
    printf("\n");
    fflush(stdout);
    run();
}
