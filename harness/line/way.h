// One direction of a line: a queue, a transmitter with a bit rate, a delay, and then loss. Pure: time is an argument, in
// nanoseconds, and the same packets at the same times get the same treatment.
//
// A packet enters, waits for those before it, is transmitted, is in flight for `delay`, and leaves or is lost. If the
// queue is full it is dropped. Changes apply from then on: rate and delay to waiting packets, losses to all.

#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#define MTU 1500
// What Ethernet adds to an IP packet: preamble 8, header 14, checksum 4, gap 12. It is transmitted and counted.
#define FRAMING 38
#define NEVER UINT64_MAX

struct packet {
    struct packet *next;
    uint64_t at;  // when it entered, while waiting; when it arrives, while in flight
    uint32_t size;  // of the IP packet
    // Left to the network card by the sender: the start of the checksummed bytes (0: none), and the checksum's place.
    uint16_t sum_from, sum_at;
    unsigned char bytes[MTU];
};

struct fifo {
    struct packet *first, **end;
};

static inline void push(struct fifo *fifo, struct packet *packet) {
    packet->next = NULL;
    if (fifo->first == NULL) fifo->end = &fifo->first;
    *fifo->end = packet;
    fifo->end = &packet->next;
}

static inline struct packet *pop(struct fifo *fifo) {
    struct packet *packet = fifo->first;
    fifo->first = packet->next;
    return packet;
}

struct count {
    uint64_t packets, bytes;
};

static inline void add(struct count *count, uint32_t size) {
    count->packets++;
    count->bytes += size + FRAMING;
}

struct way {
    double rate;  // bit/s
    uint64_t delay;  // ns
    uint64_t queue;  // bytes that may wait, including the packet in transmission
    double loss;  // 0 to 1
    uint64_t chance;  // state of the random numbers
    struct fifo waiting, flying;
    uint64_t waiting_bytes, free_at;
    struct count passed, lost, dropped;
};

static inline uint64_t way_transmitted(const struct way *way) {
    const struct packet *first = way->waiting.first;
    uint64_t start = first->at > way->free_at ? first->at : way->free_at;
    double ns = (first->size + FRAMING) * 8e9 / way->rate;
    return ns < 1e18 ? start + (uint64_t)ns : NEVER;
}

// Put the packets that have been transmitted by now in flight.
static inline void way_transmit(struct way *way, uint64_t now) {
    uint64_t done;
    while (way->waiting.first != NULL && (done = way_transmitted(way)) <= now) {
        struct packet *packet = pop(&way->waiting);
        way->waiting_bytes -= packet->size + FRAMING;
        way->free_at = done;
        packet->at = done + way->delay;
        push(&way->flying, packet);
    }
}

static inline void way_set(struct way *way, uint64_t now, double rate, uint64_t delay, uint64_t queue, double loss) {
    way_transmit(way, now);
    way->rate = rate, way->delay = delay, way->queue = queue, way->loss = loss;
}

// Returns whether there was room for the packet; if not, the caller keeps it.
static inline bool way_enter(struct way *way, struct packet *packet, uint64_t now) {
    way_transmit(way, now);
    if (way->waiting_bytes + packet->size + FRAMING > way->queue) {
        add(&way->dropped, packet->size);
        return false;
    }
    way->waiting_bytes += packet->size + FRAMING;
    packet->at = now;
    push(&way->waiting, packet);
    return true;
}

// When the next packet arrives, unless the line is changed before.
static inline uint64_t way_next(const struct way *way) {
    if (way->flying.first != NULL) return way->flying.first->at;
    if (way->waiting.first == NULL) return NEVER;
    uint64_t done = way_transmitted(way);
    return done == NEVER ? NEVER : done + way->delay;
}

// Take the next packet that has arrived by now, NULL if there is none. Whether it was `lost` depends on the seed and on
// the number of packets before it.
static inline struct packet *way_leave(struct way *way, uint64_t now, bool *lost) {
    way_transmit(way, now);
    if (way->flying.first == NULL || way->flying.first->at > now) return NULL;
    struct packet *packet = pop(&way->flying);
    uint64_t z = way->chance += 0x9e3779b97f4a7c15;  // splitmix64
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    *lost = (double)((z ^ z >> 31) >> 11) * 0x1p-53 < way->loss;
    add(*lost ? &way->lost : &way->passed, packet->size);
    return packet;
}
