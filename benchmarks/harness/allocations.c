/* Counts the bytes that torch's CPU allocator hands out (posix_memalign), freed by whichever thread.
   torch's profiler sees only the threads that it follows, and gloo frees on threads of its own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define SLOTS (1u << 20) /* far more than tensors are alive, and addresses were used */

static struct { void *address; size_t size; } slots[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long live, peak;

long allocations_live(void) { return live; }
long allocations_peak(void) { return peak; }

void allocations_reset_peak(void) {
    pthread_mutex_lock(&lock);
    peak = live;
    pthread_mutex_unlock(&lock);
}

/* The slot of an address, or the empty one where the search for it ends. */
static unsigned slot_of(void *address) {
    unsigned i = (unsigned)((uintptr_t)address >> 6) * 2654435761u % SLOTS;
    while (slots[i].address && slots[i].address != address) i = (i + 1) % SLOTS;
    return i;
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    static int (*original)(void **, size_t, size_t);
    if (!original) original = dlsym(RTLD_NEXT, "posix_memalign");
    int error = original(out, alignment, size);
    if (!error && size && alignment >= 64) { /* as torch aligns; `free` looks at no other addresses */
        pthread_mutex_lock(&lock);
        unsigned i = slot_of(*out);
        slots[i].address = *out;
        slots[i].size = size;
        live += (long)size;
        if (live > peak) peak = live;
        pthread_mutex_unlock(&lock);
    }
    return error;
}

void free(void *address) {
    static void (*original)(void *);
    if (!original) original = dlsym(RTLD_NEXT, "free");
    if (address && ((uintptr_t)address & 63) == 0) {
        pthread_mutex_lock(&lock);
        unsigned i = slot_of(address);
        if (slots[i].address == address) {
            live -= (long)slots[i].size;
            slots[i].size = 0; /* the address stays: a search for another must not end here */
        }
        pthread_mutex_unlock(&lock);
    }
    original(address);
}
