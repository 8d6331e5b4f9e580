// harness/line/way.h by itself, for tests. Reads lines from stdin:
//
//     seed N  |  set AT RATE DELAY QUEUE LOSS  |  enter AT SIZE  |  leave AT
//
// and prints a line per packet that left: its number, counted from 0 as it entered, when it arrived, and whether it was
// lost; for one that found no room: its number and "dropped".

#include "way.h"

#include <inttypes.h>
#include <stdio.h>

int main(void) {
    struct way way = {0};
    uint64_t number = 0, at, delay, queue, seed;
    uint32_t size;
    double rate, loss;
    bool lost;
    char line[256];
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (sscanf(line, "seed %" SCNu64, &seed) == 1) {
            way.chance = seed;
        } else if (sscanf(line, "set %" SCNu64 " %lf %" SCNu64 " %" SCNu64 " %lf", &at, &rate, &delay, &queue, &loss)
                   == 5) {
            way_set(&way, at, rate, delay, queue, loss);
        } else if (sscanf(line, "enter %" SCNu64 " %" SCNu32, &at, &size) == 2) {
            struct packet *packet = malloc(sizeof *packet);
            packet->size = size;
            *(uint64_t *)packet->bytes = number++;
            if (!way_enter(&way, packet, at)) printf("%" PRIu64 " dropped\n", number - 1);
        } else if (sscanf(line, "leave %" SCNu64, &at) == 1) {
            for (struct packet *packet; (packet = way_leave(&way, at, &lost)) != NULL; free(packet)) {
                const char *fate = lost ? "lost" : "passed";
                printf("%" PRIu64 " %" PRIu64 " %s\n", *(uint64_t *)packet->bytes, packet->at, fate);
            }
        } else {
            fprintf(stderr, "what? %s", line);
            return 2;
        }
    }
    struct count counts[] = {way.passed, way.lost, way.dropped};
    for (int i = 0; i < 3; i++) printf("%s%" PRIu64 " %" PRIu64, i ? " " : "", counts[i].packets, counts[i].bytes);
    printf("\n");
}
