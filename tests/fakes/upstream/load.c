// Load for a gateway or for the fake behind it; one thread, epoll.
//
//   load latency PORT CONNECTIONS REQUESTS        one request after the other on each connection
//   load stream  PORT CONNECTIONS CHUNKS RATE     one stream on each, RATE chunks/s, begun one after the other
//
// Prints one JSON line. Times are microseconds: `p50`… of a whole request, or of a chunk from the moment the fake wrote
// it ("t" in the event) to its arrival; `first_*` from sending the request to the first chunk. `bad`: answers that are
// not 200 or chunks that are not whole events.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long ns_t;
enum { BUFFER = 1 << 18, PATIENCE_MS = 15000 };

typedef struct {
    int fd, head_seen, chunked, closing, first_seen, done;
    char in[BUFFER];
    size_t in_bytes;
    long left;
    ns_t asked, begin_at;
} connection;

typedef struct {
    ns_t *values;
    size_t count, room;
} samples;

static int poller;
static samples times, firsts;
static long bad, errors;
static char request[4096];
static int request_bytes;
static const char BODY[] =
    "{\"model\":\"m\",\"stream\":true,\"messages\":[{\"role\":\"system\",\"content\":\"You are a helpful assistant on a "
    "small device.\"},{\"role\":\"user\",\"content\":\"Please tell me a long story about a robot.\"}],\"max_tokens\":512}";

static ns_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

static void add(samples *s, ns_t value) {
    if (s->count == s->room) {
        s->room = s->room ? s->room * 2 : 4096;
        s->values = realloc(s->values, s->room * sizeof *s->values);
    }
    s->values[s->count++] = value;
}

static int by_value(const void *a, const void *b) {
    ns_t x = *(const ns_t *)a, y = *(const ns_t *)b;
    return x < y ? -1 : x > y;
}

static double quantile(samples *s, double q) {
    if (!s->count) return 0;
    size_t index = q * s->count;
    return s->values[index < s->count ? index : s->count - 1] / 1000.0;
}

static int dial(int port) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) {
        perror("connect");
        exit(1);
    }
    return fd;
}

static void open_line(connection *c, int port) {
    c->fd = dial(port);
    c->in_bytes = 0;
    struct epoll_event event = {EPOLLIN, {.ptr = c}};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
}

static void ask(connection *c) {
    c->head_seen = c->first_seen = 0;
    c->asked = now();
    c->begin_at = 0;
    if (send(c->fd, request, request_bytes, MSG_NOSIGNAL) != request_bytes) errors++;
}

static void take(connection *c, size_t bytes) {
    memmove(c->in, c->in + bytes, c->in_bytes - bytes + 1);
    c->in_bytes -= bytes;
}

static int read_head(connection *c) {
    char *end = strstr(c->in, "\r\n\r\n");
    if (!end) return 0;
    *end = 0;
    if (strncmp(c->in, "HTTP/1.1 200", 12)) bad++;
    const char *length = strcasestr(c->in, "\ncontent-length:");
    c->chunked = strcasestr(c->in, "\ntransfer-encoding: chunked") != NULL;
    c->closing = strcasestr(c->in, "\nconnection: close") != NULL;
    c->left = length ? atol(length + 16) : 0;
    c->head_seen = 1;
    take(c, end + 4 - c->in);
    return 1;
}

// The events in one chunk, which may be several where something gathered them.
static void count_events(connection *c, char *data, size_t bytes, ns_t at) {
    if (strncmp(data, "data: ", 6) || memcmp(data + bytes - 2, "\n\n", 2)) bad++;
    if (!c->first_seen) {
        c->first_seen = 1;
        add(&firsts, at - c->asked);
    }
    for (char *event = data; (event = memmem(event, data + bytes - event, "\"t\":", 4)); event += 4)
        add(&times, at - strtoull(event + 4, NULL, 10));
}

// 1 when the answer is complete.
static int read_body(connection *c, ns_t at) {
    if (!c->chunked) {
        size_t used = (long)c->in_bytes < c->left ? c->in_bytes : (size_t)c->left;
        c->left -= used;
        take(c, used);
        return c->left == 0;
    }
    for (;;) {
        char *line = memmem(c->in, c->in_bytes, "\r\n", 2);
        if (!line) return 0;
        size_t bytes = strtoul(c->in, NULL, 16), whole = line + 2 - c->in + bytes + 2;
        if (c->in_bytes < whole) return 0;
        if (bytes) count_events(c, line + 2, bytes, at);
        take(c, whole);
        if (!bytes) return 1;
    }
}

int main(int argc, char **argv) {
    if (argc < 5) return 64;
    int latency = !strcmp(argv[1], "latency"), port = atoi(argv[2]), count = atoi(argv[3]);
    long amount = atol(argv[4]), total = latency ? amount : count, asked = 0, done = 0;
    double rate = argc > 5 ? atof(argv[5]) : 0;
    request_bytes = sprintf(request,
                            "POST /v1/chat/completions?stream=%d&n=%ld&rate=%g HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
                            "User-Agent: OpenAI/Python\r\nAccept: application/json\r\nAccept-Encoding: gzip, deflate\r\n"
                            "Authorization: Bearer sk-xxxxxxxxxxxxxxxxxxxxxxxx\r\nX-Stainless-Lang: python\r\n"
                            "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                            !latency, latency ? 0 : amount, rate, port, strlen(BODY), BODY);
    connection *all = calloc(count, sizeof *all);
    poller = epoll_create1(0);
    ns_t began = now();
    for (int i = 0; i < count; i++) {
        open_line(&all[i], port);
        all[i].begin_at = now() + (latency || rate <= 0 ? 0 : (ns_t)(i * 1e9 / rate / count));
    }
    while (done < total) {
        int pending = 0;
        for (int i = 0; i < count; i++) {
            if (!all[i].begin_at || asked >= total) continue;
            if (now() >= all[i].begin_at) {
                asked++;
                ask(&all[i]);
            } else pending = 1;
        }
        struct epoll_event events[64];
        int ready = epoll_wait(poller, events, 64, pending ? 0 : PATIENCE_MS);
        if (!ready && !pending) {
            errors++;
            break;
        }
        for (int i = 0; i < ready; i++) {
            connection *c = events[i].data.ptr;
            ssize_t bytes = recv(c->fd, c->in + c->in_bytes, BUFFER - 1 - c->in_bytes, MSG_DONTWAIT);
            if (bytes < 0 && errno == EAGAIN) continue;
            if (bytes <= 0) { // hung up; where no answer is due, that is no error
                close(c->fd);
                if (!c->done) {
                    errors++;
                    done++;
                }
                c->done = 1;
                continue;
            }
            ns_t at = now();
            c->in_bytes += bytes;
            c->in[c->in_bytes] = 0;
            if (!c->head_seen && !read_head(c)) continue;
            if (!read_body(c, at)) continue;
            done++;
            if (latency) add(&times, at - c->asked);
            c->done = !latency || asked >= total;
            if (c->done) continue;
            if (c->closing) {
                close(c->fd);
                open_line(c, port);
            }
            asked++;
            ask(c);
        }
    }
    double seconds = (now() - began) / 1e9;
    qsort(times.values, times.count, sizeof *times.values, by_value);
    qsort(firsts.values, firsts.count, sizeof *firsts.values, by_value);
    printf("{\"count\":%zu,\"seconds\":%.3f,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"first_p50\":%.1f,\"first_max\":%.1f,"
           "\"bad\":%ld,\"errors\":%ld}\n",
           times.count, seconds, quantile(&times, .5), quantile(&times, .9), quantile(&times, .99),
           quantile(&firsts, .5), quantile(&firsts, 1), bad, errors);
    return errors || bad;
}
