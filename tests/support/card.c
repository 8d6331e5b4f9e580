// harness/line/card.h by itself, for tests: a TCP packet of HEAD bytes of heads and PAYLOAD bytes is cut into
// packets of MOST bytes of payload at most, those whose numbers are given are lost, and the others are joined.
//
//     card HEAD PAYLOAD MOST FLAGS [LOST ...]
//
// Prints a line per packet that was cut: its length, IP's id and TCP's sequence number and flags; an empty line; and a
// line per joint: how many packets, its length, sequence number and flags, and "sound" if heads and payload are right.

#include "card.h"

#include <stdio.h>

static unsigned char payload_at(uint32_t place) { return place * 2654435761u >> 24; }

static bool sound(const struct joint *joint, int parts, uint32_t size) {
    static unsigned char bytes[MAX_BYTES];
    uint32_t have = 0;
    for (int i = 1; i < parts; i++) {
        memcpy(bytes + have, joint->parts[i].iov_base, joint->parts[i].iov_len);
        have += joint->parts[i].iov_len;
    }
    uint32_t heads = IP_BYTES + (bytes[IP_BYTES + LENGTH_AT] >> 4) * 4;
    bool right = have == size && get16(bytes + 2) == size && sum(bytes, IP_BYTES, 0) == 0xffff;
    right &= get16(bytes + IP_BYTES + SUM_AT) == sum(bytes + 12, 8, TCP + size - IP_BYTES);
    uint32_t sequence = get32(bytes + IP_BYTES + SEQUENCE_AT);
    for (uint32_t i = heads; i < size; i++) right &= bytes[i] == payload_at(sequence + i - heads);
    bool whole = joint->count == 1;
    return right && joint->head.flags == VIRTIO_NET_HDR_F_NEEDS_CSUM && joint->head.csum_start == IP_BYTES
        && joint->head.csum_offset == SUM_AT && joint->head.gso_type == (whole ? 0 : VIRTIO_NET_HDR_GSO_TCPV4)
        && joint->head.gso_size == (whole ? 0 : joint->packets[0]->size - heads);
}

static void deliver(struct joint *joint) {
    if (joint->count == 0) return;
    int parts = joint_parts(joint);
    uint32_t size = 0;
    for (int i = 1; i < parts; i++) size += joint->parts[i].iov_len;
    const unsigned char *tcp = (unsigned char *)joint->parts[1].iov_base + IP_BYTES;
    printf("%d %u %u %02x %s\n", joint->count, size, get32(tcp + SEQUENCE_AT), tcp[FLAGS_AT],
           sound(joint, parts, size) ? "sound" : "wrong");
    joint->count = 0;
}

int main(int argc, char **argv) {
    static struct frame frame;
    static struct joint joint;
    uint32_t heads = atoi(argv[1]), payload = atoi(argv[2]), most = atoi(argv[3]), first = 0xfffffc00;
    unsigned char *ip = frame.bytes, *tcp = ip + IP_BYTES;
    for (uint32_t i = 0; i < heads; i++) ip[i] = i;
    ip[0] = 0x45, ip[9] = TCP;
    put16(ip + 4, 0xffff);
    put32(tcp + SEQUENCE_AT, first);  // it wraps around on the way
    tcp[LENGTH_AT] = (heads - IP_BYTES) / 4 << 4;
    tcp[FLAGS_AT] = strtoul(argv[4], NULL, 16);
    for (uint32_t i = 0; i < payload; i++) ip[heads + i] = payload_at(first + i);
    frame.head.flags = VIRTIO_NET_HDR_F_NEEDS_CSUM;
    frame.head.csum_start = IP_BYTES, frame.head.csum_offset = SUM_AT;
    frame.head.gso_type = VIRTIO_NET_HDR_GSO_TCPV4, frame.head.gso_size = most;

    struct packet *packets[MAX_BYTES];
    int count = 0;
    for (struct cut cut = cut_begin(&frame, sizeof frame.head + heads + payload); cut.left > 0; count++) {
        cut_next(&cut, packets[count] = malloc(sizeof **packets));
        const unsigned char *bytes = packets[count]->bytes;
        printf("%u %u %u %02x\n", packets[count]->size, get16(bytes + 4), get32(bytes + IP_BYTES + SEQUENCE_AT),
               bytes[IP_BYTES + FLAGS_AT]);
    }
    printf("\n");
    for (int i = 0; i < count; i++) {
        bool lost = false;
        for (int each = 5; each < argc; each++) lost |= atoi(argv[each]) == i;
        if (lost) continue;
        if (!joins(&joint, packets[i])) deliver(&joint);
        joint.packets[joint.count++] = packets[i];
    }
    deliver(&joint);
}
