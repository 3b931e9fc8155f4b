// A fake llama-server that costs next to nothing: one thread, epoll, HTTP/1.1 with keep-alive.
//
//   upstream PORT SOCKET
//
// POST: the query says how to answer: stream=0|1 n=chunks rate=chunks/s size=bytes delay=ms.
//   stream=0: one JSON body of `size` bytes. stream=1: `n` server-sent events, each with the time it was written ("t").
// GET /stats: what was seen: connections open and accepted, requests, body bytes, disconnects and when the last came.
// Like the real one it closes a connection after 100 requests or 5 idle seconds.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long ns_t;
enum { MAX_REQUESTS = 100, IN_BYTES = 65536, OUT_BYTES = 1 << 20 };
static const ns_t IDLE_NS = 5000000000ULL;

enum state { HEAD, BODY, WAIT, STREAM };

typedef struct connection {
    int fd, listening, polled_out, dead;
    enum state state;
    char in[IN_BYTES];
    size_t in_bytes;
    char *out;
    size_t out_bytes, out_sent;
    long body_left, body_bytes; // body_left < 0: chunked
    int stream, served;
    long chunks, sent, size;
    double rate;
    ns_t due, idle_since;
    struct connection *next, *previous;
} connection;

static int poller;
static connection *all;
static struct {
    ns_t accepted, open, requests, body, disconnects, last_disconnect, chunks;
} seen;

static ns_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ULL + t.tv_nsec;
}

static void drop(connection *c, int by_peer) {
    if (by_peer && c->state != HEAD) {
        seen.disconnects++;
        seen.last_disconnect = now();
    }
    close(c->fd);
    seen.open--;
    if (c->previous) c->previous->next = c->next;
    else all = c->next;
    if (c->next) c->next->previous = c->previous;
    free(c->out);
    free(c);
}

static void want_out(connection *c, int out) {
    if (c->polled_out == out) return;
    struct epoll_event event = {EPOLLIN | EPOLLRDHUP | (out ? EPOLLOUT : 0), {.ptr = c}};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
    c->polled_out = out;
}

// Sends what is waiting; marks the connection dead when the other side is gone.
static void flush(connection *c) {
    while (c->out_sent < c->out_bytes) {
        ssize_t count = send(c->fd, c->out + c->out_sent, c->out_bytes - c->out_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count < 0) {
            if (errno == EAGAIN) want_out(c, 1);
            else c->dead = 1;
            return;
        }
        c->out_sent += count;
    }
    c->out_bytes = c->out_sent = 0;
    want_out(c, 0);
}

static void put(connection *c, const char *data, size_t bytes) {
    if (c->out_bytes + bytes > OUT_BYTES) abort();
    memcpy(c->out + c->out_bytes, data, bytes);
    c->out_bytes += bytes;
}

static void finish(connection *c) {
    c->state = HEAD;
    c->idle_since = now();
    if (++c->served >= MAX_REQUESTS) c->dead = 2;
}

static void answer(connection *c, const char *type, const char *body, size_t bytes) {
    char head[256];
    const char *last = c->served + 1 >= MAX_REQUESTS ? "close" : "keep-alive";
    int n = sprintf(head, "HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: %s\r\nContent-Length: %zu\r\nConnection: %s\r\n\r\n",
                    type, bytes, last);
    put(c, head, n);
    put(c, body, bytes);
    finish(c);
    flush(c);
}

static void answer_stats(connection *c) {
    char body[512];
    int n = sprintf(body,
                    "{\"accepted\":%llu,\"open\":%llu,\"requests\":%llu,\"body\":%llu,\"disconnects\":%llu,"
                    "\"last_disconnect\":%llu,\"chunks\":%llu,\"now\":%llu}",
                    seen.accepted, seen.open, seen.requests, seen.body, seen.disconnects, seen.last_disconnect,
                    seen.chunks, now());
    answer(c, "application/json", body, n);
}

static void answer_whole(connection *c) {
    static char body[OUT_BYTES / 2];
    int n = sprintf(body, "{\"object\":\"chat.completion\",\"body_bytes\":%ld,\"pad\":\"", c->body_bytes);
    long size = c->size > n + 2 ? c->size : n + 2;
    memset(body + n, 'x', size - n);
    memcpy(body + size - 2, "\"}", 2);
    answer(c, "application/json; charset=utf-8", body, size);
}

static void put_event(connection *c) {
    char event[4096], head[16];
    int n = sprintf(event, "data: {\"t\":%020llu,\"i\":%08ld,\"object\":\"chat.completion.chunk\",\"pad\":\"", now(), c->sent);
    int size = c->size > n + 4 ? c->size : n + 4;
    memset(event + n, 'x', size - n);
    memcpy(event + size - 4, "\"}\n\n", 4);
    put(c, head, sprintf(head, "%x\r\n", size));
    put(c, event, size);
    put(c, "\r\n", 2);
    c->sent++;
    seen.chunks++;
}

// What is due on this connection.
static void pump(connection *c, ns_t at) {
    if (c->dead || c->out_bytes || at < c->due) return;
    if (c->state == WAIT) {
        if (!c->stream) {
            answer_whole(c);
            return;
        }
        const char *head = "HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n"
                           "Transfer-Encoding: chunked\r\n\r\n";
        put(c, head, strlen(head));
        c->state = STREAM;
        c->due = at;
    }
    if (c->state != STREAM) return;
    for (int burst = 64; burst-- && c->sent < c->chunks && (c->rate <= 0 || at >= c->due);) {
        put_event(c);
        if (c->rate > 0) c->due += 1e9 / c->rate;
    }
    if (c->sent >= c->chunks) {
        put(c, "0\r\n\r\n", 5);
        finish(c);
    }
    flush(c);
}

static double query(const char *target, const char *name, double otherwise) {
    char key[32];
    sprintf(key, "%s=", name);
    const char *end = strchr(target, '\r'), *at = strstr(target, key);
    return at && at < end ? atof(at + strlen(key)) : otherwise;
}

static void begin(connection *c, const char *head) {
    seen.requests++;
    if (!strncmp(head, "GET /stats", 10)) {
        answer_stats(c);
        return;
    }
    const char *length = strcasestr(head, "\ncontent-length:");
    c->body_left = strcasestr(head, "\ntransfer-encoding: chunked") ? -1 : length ? atol(length + 16) : 0;
    c->body_bytes = c->sent = 0;
    c->stream = query(head, "stream", 0);
    c->chunks = query(head, "n", 100);
    c->rate = query(head, "rate", 0);
    c->size = query(head, "size", c->stream ? 250 : 1024);
    c->due = now() + query(head, "delay", 0) * 1e6;
    c->state = BODY;
}

static void take(connection *c, size_t bytes) {
    memmove(c->in, c->in + bytes, c->in_bytes - bytes);
    c->in_bytes -= bytes;
}

static void body(connection *c) {
    size_t used = c->in_bytes;
    int done;
    if (c->body_left >= 0) {
        if ((long)used > c->body_left) used = c->body_left;
        c->body_left -= used;
        done = c->body_left == 0;
    } else { // good enough for a fake: the last chunk ends what is in hand
        done = used >= 5 && !memcmp(c->in + used - 5, "0\r\n\r\n", 5);
        if (!done) used = used > 5 ? used - 5 : 0;
    }
    c->body_bytes += used;
    seen.body += used;
    take(c, used);
    if (done) c->state = WAIT;
}

static void feed(connection *c) {
    while (!c->dead) {
        if (c->state == HEAD) {
            c->in[c->in_bytes] = 0;
            char *end = strstr(c->in, "\r\n\r\n");
            if (!end) return;
            size_t bytes = end + 4 - c->in;
            end[2] = 0;
            begin(c, c->in);
            take(c, bytes);
        } else if (c->state == BODY) {
            long before = c->body_left;
            body(c);
            if (c->state == BODY && (before < 0 || c->in_bytes == 0)) return;
        } else {
            pump(c, now());
            return;
        }
    }
}

static void receive(connection *c) {
    while (!c->dead) {
        ssize_t count = recv(c->fd, c->in + c->in_bytes, IN_BYTES - 1 - c->in_bytes, MSG_DONTWAIT);
        if (count <= 0) {
            if (count == 0 || errno != EAGAIN) c->dead = 1;
            return;
        }
        c->in_bytes += count;
        feed(c);
    }
}

static void welcome(connection *listener) {
    for (int fd; (fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        connection *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->out = malloc(OUT_BYTES);
        c->idle_since = now();
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        c->next = all;
        if (all) all->previous = c;
        all = c;
        struct epoll_event event = {EPOLLIN | EPOLLRDHUP, {.ptr = c}};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
        seen.accepted++;
        seen.open++;
    }
}

static void listen_on(connection *listener, int fd, struct sockaddr *address, socklen_t bytes) {
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (bind(fd, address, bytes) || listen(fd, 512)) {
        perror("bind");
        exit(1);
    }
    listener->fd = fd;
    listener->listening = 1;
    struct epoll_event event = {EPOLLIN, {.ptr = listener}};
    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
}

int main(int argc, char **argv) {
    static connection listeners[2];
    if (argc != 3) return 64;
    signal(SIGPIPE, SIG_IGN);
    poller = epoll_create1(EPOLL_CLOEXEC);
    struct sockaddr_in tcp = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    tcp.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listen_on(&listeners[0], socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), (struct sockaddr *)&tcp, sizeof tcp);
    struct sockaddr_un path = {.sun_family = AF_UNIX};
    strncpy(path.sun_path, argv[2], sizeof path.sun_path - 1);
    unlink(argv[2]);
    listen_on(&listeners[1], socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0), (struct sockaddr *)&path, sizeof path);
    for (;;) {
        ns_t at = now(), next = at + 100000000ULL;
        for (connection *c = all; c; c = c->next)
            if ((c->state == STREAM || c->state == WAIT) && !c->out_bytes && c->due < next) next = c->due;
        struct timespec wait = {0, next > at ? next - at : 0};
        struct epoll_event events[256];
        int count = epoll_pwait2(poller, events, 256, &wait, NULL);
        for (int i = 0; i < count; i++) {
            connection *c = events[i].data.ptr;
            if (c->listening) {
                welcome(c);
                continue;
            }
            if (events[i].events & EPOLLIN) receive(c);
            if (events[i].events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP)) c->dead = 1;
            if (!c->dead && events[i].events & EPOLLOUT) flush(c);
        }
        at = now();
        for (connection *c = all, *after; c; c = after) {
            after = c->next;
            pump(c, at);
            int idle = c->state == HEAD && !c->in_bytes && at > c->idle_since + IDLE_NS;
            if ((c->dead == 2 || idle) && !c->out_bytes) drop(c, 0);
            else if (c->dead == 1) drop(c, 1);
        }
    }
}
