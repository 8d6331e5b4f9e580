// Segmentation offload, as in a network card: large TCP sends are cut into packets, and packets that arrive together are
// joined. So a host handles many at once, while the line carries, drops and loses each packet separately.

#pragma once
#include "way.h"

#include <linux/virtio_net.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>

#define MAX_BYTES 65535
#define MAX_JOINED 44
#define IP_BYTES 20
#define TCP 6
#define ACK 0x10
#define PSH 0x08
#define FIN 0x01
#define SUM_AT 16  // in the TCP header, like the next three
#define SEQUENCE_AT 4
#define LENGTH_AT 12
#define FLAGS_AT 13

// What a TUN device reads and writes: with IFF_VNET_HDR a separate header precedes the IP packet.
struct frame {
    struct virtio_net_hdr head;
    unsigned char bytes[MAX_BYTES];
};

static inline uint32_t get16(const unsigned char *at) { return at[0] << 8 | at[1]; }
static inline void put16(unsigned char *at, uint32_t value) { at[0] = value >> 8, at[1] = value; }
static inline uint32_t get32(const unsigned char *at) { return get16(at) << 16 | get16(at + 2); }
static inline void put32(unsigned char *at, uint32_t value) { put16(at, value >> 16), put16(at + 2, value & 0xffff); }

static inline uint32_t sum(const unsigned char *at, int size, uint32_t value) {
    for (int i = 0; i < size; i += 2) value += get16(at + i);
    while (value >> 16) value = (value & 0xffff) + (value >> 16);
    return value;
}

// Write the length of an IPv4 TCP packet, the IP header's checksum, and the part of TCP's checksum that a host writes.
static inline void write_size(unsigned char *ip, uint32_t size) {
    put16(ip + 2, size);
    put16(ip + 10, 0);
    put16(ip + 10, ~sum(ip, IP_BYTES, 0));
    put16(ip + IP_BYTES + SUM_AT, sum(ip + 12, 8, TCP + size - IP_BYTES));
}

struct cut {
    const struct frame *frame;
    uint32_t heads, most;  // bytes of the IP and TCP headers; most payload bytes of a packet
    uint32_t done, left;  // payload bytes, or all bytes if it is not cut
};

// Start to cut a frame of `size` bytes. A frame that is not IPv4, or has options, is dropped (left = 0).
static inline struct cut cut_begin(const struct frame *frame, ssize_t size) {
    uint32_t bytes = size - sizeof frame->head;
    const unsigned char *ip = frame->bytes;
    if (bytes < IP_BYTES || ip[0] != 0x45) return (struct cut){.left = 0};
    if (frame->head.gso_type != VIRTIO_NET_HDR_GSO_TCPV4) return (struct cut){frame, 0, MTU, 0, bytes};
    uint32_t heads = IP_BYTES + (ip[IP_BYTES + LENGTH_AT] >> 4) * 4;
    return (struct cut){frame, heads, frame->head.gso_size, 0, bytes - heads};
}

static inline void cut_next(struct cut *cut, struct packet *packet) {
    const struct frame *frame = cut->frame;
    uint32_t payload = cut->left < cut->most ? cut->left : cut->most;
    bool sums = frame->head.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM;
    packet->size = cut->heads + payload;
    packet->sum_from = sums ? frame->head.csum_start : 0;
    packet->sum_at = frame->head.csum_offset;
    memcpy(packet->bytes, frame->bytes, cut->heads);
    memcpy(packet->bytes + cut->heads, frame->bytes + cut->heads + cut->done, payload);
    if (cut->heads > 0) {
        unsigned char *ip = packet->bytes, *tcp = ip + IP_BYTES;
        put16(ip + 4, get16(ip + 4) + cut->done / cut->most);
        put32(tcp + SEQUENCE_AT, get32(tcp + SEQUENCE_AT) + cut->done);
        if (payload < cut->left) tcp[FLAGS_AT] &= ~(PSH | FIN);
        write_size(ip, packet->size);
    }
    cut->done += payload, cut->left -= payload;
}

// Packets that are delivered together.
struct joint {
    struct packet *packets[MAX_JOINED];
    int count;
    struct virtio_net_hdr head;
    unsigned char heads[IP_BYTES + 60];
    struct iovec parts[MAX_JOINED + 2];
};

static inline uint32_t heads_of(const struct packet *packet) {
    return IP_BYTES + (packet->bytes[IP_BYTES + LENGTH_AT] >> 4) * 4;
}

// Whether the packet continues where the joint ends, by the rules of receive offload: all packets but the last have the
// size of the first, and only the sequence number differs.
static inline bool joins(const struct joint *joint, const struct packet *packet) {
    if (joint->count == 0) return true;
    if (joint->count == MAX_JOINED) return false;
    const struct packet *first = joint->packets[0], *last = joint->packets[joint->count - 1];
    const unsigned char *a = last->bytes, *b = packet->bytes;
    if (packet->sum_from != IP_BYTES || last->sum_from != IP_BYTES || a[9] != TCP) return false;
    uint32_t heads = heads_of(last), payload = last->size - heads;
    const unsigned char *s = a + IP_BYTES, *t = b + IP_BYTES;
    return payload > 0 && last->size == first->size && packet->size > heads && packet->size <= first->size
        && memcmp(a, b, 2) == 0 && memcmp(a + 6, b + 6, 4) == 0 && memcmp(a + 12, b + 12, 8) == 0
        && memcmp(s, t, SEQUENCE_AT) == 0 && get32(s + SEQUENCE_AT) + payload == get32(t + SEQUENCE_AT)
        && memcmp(s + 8, t + 8, FLAGS_AT - 8) == 0 && s[FLAGS_AT] == ACK && (t[FLAGS_AT] & ~PSH) == ACK
        && memcmp(s + 14, t + 14, 2) == 0 && memcmp(s + 18, t + 18, heads - IP_BYTES - 18) == 0;
}

// Fill `parts` for writev; return their number.
static inline int joint_parts(struct joint *joint) {
    struct packet *first = joint->packets[0], *last = joint->packets[joint->count - 1];
    joint->head = (struct virtio_net_hdr){0};
    joint->parts[0] = (struct iovec){&joint->head, sizeof joint->head};
    if (first->sum_from > 0) {
        joint->head.flags = VIRTIO_NET_HDR_F_NEEDS_CSUM;
        joint->head.csum_start = first->sum_from;
        joint->head.csum_offset = first->sum_at;
    }
    if (joint->count == 1) {
        joint->parts[1] = (struct iovec){first->bytes, first->size};
        return 2;
    }
    uint32_t heads = heads_of(first), size = heads;
    for (int i = 0; i < joint->count; i++) {
        uint32_t payload = joint->packets[i]->size - heads;
        joint->parts[i + 2] = (struct iovec){joint->packets[i]->bytes + heads, payload};
        size += payload;
    }
    memcpy(joint->heads, first->bytes, heads);
    joint->heads[IP_BYTES + FLAGS_AT] |= last->bytes[IP_BYTES + FLAGS_AT] & PSH;
    write_size(joint->heads, size);
    joint->parts[1] = (struct iovec){joint->heads, heads};
    joint->head.gso_type = VIRTIO_NET_HDR_GSO_TCPV4;
    joint->head.hdr_len = heads;
    joint->head.gso_size = first->size - heads;
    return joint->count + 2;
}
