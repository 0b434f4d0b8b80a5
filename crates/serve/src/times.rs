//! Every time limit and delay of the daemon. A comment names what must happen within the time;
//! "Over" says what the daemon does if the time passes first. Times of a session or a queue are in
//! the crates `transport` and `engine`.

use std::time::Duration;

// Commands of the client. `CLIENT_OPEN` and the times after it are added to `CLIENT_ANSWER`.

/// The daemon answers a command. Over: the command fails.
pub const CLIENT_ANSWER: Duration = Duration::from_secs(5);
/// Delay before the client tries again to connect to a daemon that serves as many clients as it
/// can.
pub const CLIENT_RETRY: Duration = Duration::from_millis(50);
/// Further time for the answer while the daemon opens and closes a device. Over: the command fails;
/// the daemon may still carry out the change.
pub const CLIENT_OPEN: Duration = Duration::from_secs(25);
/// As `CLIENT_OPEN`, for all devices of a configuration.
pub const CLIENT_OPEN_ALL: Duration = Duration::from_secs(115);
/// As `CLIENT_OPEN`, for changes that open nothing.
pub const CLIENT_AT_ONCE: Duration = Duration::ZERO;
/// As `CLIENT_OPEN`, for a resize: ten seconds for requests in flight, and a slow host that changes
/// a large file.
pub const CLIENT_RESIZE: Duration = Duration::from_secs(25);

// Control sockets and the API.

/// The host creates a control socket at the start. Over: the start continues, and the socket
/// listens later.
pub const CONTROL_LISTEN: Duration = Duration::from_secs(5);
/// Delay before the next attempt to listen on a control socket whose path another process uses.
pub const CONTROL_LISTEN_RETRY: Duration = Duration::from_millis(200);
/// The name of a client's program is read in /proc, for the log. Over: the log shows no name.
pub const CLIENT_NAME: Duration = Duration::from_millis(20);
/// A client sends the head of a request; also the longest gap between two requests. Over: the
/// connection is closed.
pub const HTTP_HEADER: Duration = Duration::from_secs(5);
/// A client reads a whole answer. Over: the connection is closed.
pub const HTTP_ANSWER: Duration = Duration::from_secs(30);
/// The whole body of a request arrives. Over: the request is refused.
pub const HTTP_BODY: Duration = Duration::from_secs(10);
/// An event happens for a client that waits for one. Over: the client gets an empty list, and asks
/// again.
pub const EVENTS_WAIT: Duration = Duration::from_secs(25);
/// Delay before another log line about refused requests of the same user.
pub const REFUSAL_LINE_EACH: Duration = Duration::from_secs(5);
/// Delay before the metrics listener tries again to accept a scraper, or to bind its address.
pub const SCRAPE_RETRY: Duration = Duration::from_millis(200);

// Devices and changes.

/// All devices end with the daemon. Over: the daemon exits without waiting, the kernel kills device
/// processes that are stuck, and images stay locked until their requests have ended.
pub const DEVICES_END: Duration = Duration::from_secs(5);
/// Tasks of devices end: ten seconds for a device process to stop a device, and ten to release its
/// image. Over: that is logged, and the change goes on.
pub const TASKS_END: Duration = Duration::from_secs(25);
/// The descriptors of a device are closed, or the host checks a plan. Over: the change is refused.
pub const DEVICE_CLOSE: Duration = Duration::from_secs(10);
/// Delay between two checks whether the descriptors are closed.
pub const DEVICE_CLOSE_LOOK: Duration = Duration::from_millis(1);
/// All queues read a new limit before the change is answered. Over: the change is answered all the
/// same; a queue that is moving to another worker reads the limit later.
pub const LIMIT_SEEN: Duration = Duration::from_millis(100);
/// The host opens one device, or makes its socket, at the start or in a change. Over: the start or
/// the change continues without the device, which is shown as waiting.
pub const DEVICE_OPEN: Duration = Duration::from_secs(1);
/// As `DEVICE_OPEN`, for all slow devices of a start or change together.
pub const DEVICES_OPEN: Duration = Duration::from_secs(5);
/// As `DEVICE_OPEN`, for each further device after `DEVICES_OPEN` has passed.
pub const DEVICE_OPEN_MIN: Duration = Duration::from_millis(20);
/// First and longest delay before the next attempt to open a device that waits.
pub const DEVICE_BACKOFF: (Duration, Duration) =
    (Duration::from_millis(20), Duration::from_secs(1));
/// A killed process releases an image, tap or socket, at the start or in a change. Over: the device
/// is shown as waiting.
pub const DEVICE_HELD: Duration = Duration::from_millis(500);

// Disks behind helpers and NBD servers.

/// A server answers a request. Over: the connection is considered dead, and the disk reconnects.
pub const NBD_REQUEST: Duration = Duration::from_secs(30);
/// The host connects to a server, and the server negotiates. Over: the attempt has failed, and is
/// repeated.
pub const NBD_CONNECT: Duration = Duration::from_secs(5);
/// Least time between two connections that the supervisor makes for a disk of a device process
/// which asks for connections without end.
pub const NBD_CONNECT_EACH: Duration = Duration::from_millis(10);
/// A process starts, and asks a server for its export. Over: the device waits, and is tried again
/// later.
pub const NBD_MEASURE: Duration = Duration::from_secs(10);
/// The last frames of a capture are written when its port is closed. Over: they are lost.
pub const CAPTURE_END: Duration = Duration::from_secs(2);
/// The captured frames of a device are written to the capture file when the device is handed over
/// or removed. Over: the last frames are lost.
pub const CAPTURE_SETTLE: Duration = Duration::from_secs(2);
/// The former capture into the same file closes it and drops its lock. Over: the device is shown
/// as waiting.
pub const CAPTURE_LOCK: Duration = Duration::from_millis(500);
/// Delay before the next attempt to lock the capture file.
pub const CAPTURE_LOCK_RETRY: Duration = Duration::from_millis(10);
/// The connections of a device are shut down when its device process no longer serves the device.
/// Over: a thread continues the shutdown, and the device does not wait for it.
pub const NBD_SHUT: Duration = Duration::from_millis(500);
/// A helper answers a command on its QMP monitor. Over: the command fails, and the helper is
/// restarted.
pub const HELPER_MONITOR: Duration = Duration::from_secs(5);
/// One of the hundred waits for a helper that starts for the first time: five seconds in all. Over,
/// a hundred times: the disk is not served.
pub const HELPER_START_STEP: Duration = Duration::from_millis(50);
/// First and longest delay before a helper is started again.
pub const HELPER_BACKOFF: (Duration, Duration) =
    (Duration::from_millis(10), Duration::from_secs(5));
/// A helper that runs this long is considered healthy: the delay before a restart is the first one
/// again.
pub const HELPER_LASTS: Duration = Duration::from_secs(10);
/// A helper ends on SIGTERM. Over: it is killed.
pub const HELPER_END: Duration = Duration::from_secs(5);
/// The next helper starts during a resize. Over: the resize fails.
pub const HELPER_NEXT: Duration = Duration::from_secs(10);

// Device processes: start and end.

/// Delay before the next warm process is started: starting one takes CPU time, which a connecting
/// front-end's own device process needs more.
pub const WARM_DELAY: Duration = Duration::from_millis(500);
/// Warm processes start before a takeover. Over: the takeover continues, and device processes start
/// when they are needed.
pub const WARM_START: Duration = Duration::from_secs(3);
/// First delay before a device process that died at once is started again.
pub const START_BACKOFF: Duration = Duration::from_millis(200);
/// Longest delay before a device process is started again.
pub const START_BACKOFF_MAX: Duration = Duration::from_secs(5);
/// If a device process dies within this time, its commands may be the cause: the delay doubles.
pub const PROCESS_BRIEF: Duration = Duration::from_secs(2);
/// The API shows a Xen guest's device process that has ended. Over: the process is no longer shown.
pub const PROCESS_SHOWN: Duration = Duration::from_secs(60);
/// A device process serves no connected front-end. Over: the process is ended.
pub const PROCESS_IDLE: Duration = Duration::from_secs(60);
/// The kernel ends a killed process. Over: the process is shown as stuck, and its devices wait.
pub const PROCESS_END: Duration = Duration::from_secs(1);
/// Delay before the next attempt to reap a child that has not ended.
pub const REAP_RETRY: Duration = Duration::from_secs(1);
/// A child that has ended is reaped, so that a message can show its exit status. Over: the message
/// shows none.
pub const REAP_STATUS: Duration = Duration::from_millis(100);
/// In a device process, requests in flight end after the supervisor is gone. Over: the process
/// exits.
pub const PROCESS_QUIT: Duration = Duration::from_secs(2);
/// The last log lines of a process that has ended arrive. Over: they are lost.
pub const LAST_LINES: Duration = Duration::from_millis(50);
/// In the log, the interval between lines of one sort after a burst is used up.
pub const LOG_LINE_EACH: Duration = Duration::from_millis(100);
/// Delay before another log line about denied calls of the same process.
pub const DENIED_LINE_EACH: Duration = Duration::from_secs(10);

// Device processes: commands and reports.

/// A process starts, reads commands and answers; the descriptors that it sent are closed. Over: the
/// process is killed. Also, before the kill, an image is released and the size of a disk is
/// measured within this time. Over: the change continues without them.
pub const PROCESS_ANSWER: Duration = Duration::from_secs(10);
/// A process writes its counters after the supervisor has asked for them. Over: the API, the
/// metrics and a log line call the process unresponsive, its last counters are shown, and no later
/// reader waits for the process until it has answered. The end of all device processes waits as
/// long for their last counters.
pub const PROCESS_COUNTERS_WAIT: Duration = Duration::from_millis(200);
/// Least time between two reports of a domain that the supervisor reads.
pub const REPORT_EACH: Duration = Duration::from_micros(320);
/// Least time between two reports that the sessions of a domain send: longer than `REPORT_EACH`, so
/// that reports do not pile up.
pub const SESSION_REPORT_EACH: Duration = Duration::from_micros(400);
/// Delay before a message is sent again after the kernel refused its descriptors (`ETOOMANYREFS`).
pub const CHANNEL_RETRY: Duration = Duration::from_millis(10);
/// First and longest delay before the daemon connects again to a front-end that listens.
pub const FRONT_CONNECT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Longest delay before the next attempt to accept a client, to pass a client to a device process,
/// or to release the image or interface of a former device process.
pub const FRONT_RETRY: Duration = Duration::from_millis(200);
/// Delay before a device process starts the uplink of its switch again, and before the supervisor
/// opens the queues of an interface again for a device process.
pub const UPLINK_RETRY: Duration = Duration::from_secs(1);
/// Requests in flight end before a disk becomes smaller. Over: the resize fails with EBUSY.
pub const SHRINK: Duration = Duration::from_secs(10);
/// Requests of a device process that has ended complete in the kernel. Over: that is logged, and
/// the image waits on. If the journals of a device are dropped, its front-ends are disconnected at
/// that time.
pub const RECLAIM: Duration = Duration::from_secs(1);
/// Queues of a device process read a new limit. Over: a queue that is moving to another worker
/// reads it later.
pub const PROCESS_LIMIT_SEEN: Duration = Duration::from_secs(1);

// Takeover by the next daemon.

/// A device process quiesces. Over: it is killed, and the takeover waits for its end.
pub const QUIESCE: Duration = Duration::from_secs(1);
/// The supervisor's disk object is closed. Over: the next supervisor gets the lock mark of the
/// image, and waits for its end.
pub const HAND_OFF_DISK: Duration = Duration::from_millis(300);
/// All device processes have quiesced or ended. Over: the takeover fails, except that a killed
/// process which the kernel does not end is passed to the next supervisor. Three more waits are as
/// long: for a change under way, for the end of the running supervisor, and for its control socket.
pub const HANDOFF_END: Duration = Duration::from_secs(3);
/// The next supervisor opens everything in its plan, and receives each message. Over: the running
/// supervisor continues to serve.
pub const HANDOFF_OPEN: Duration = Duration::from_secs(15);
/// The socket to the other supervisor has room for a last message. Over: the message is not sent.
pub const HANDOFF_LAST: Duration = Duration::from_millis(100);
/// Delay before the next check of the control socket of a daemon that may have died.
pub const HANDOFF_LOOK: Duration = Duration::from_millis(20);
/// The disks of Xen guests stop. Over: the device processes of those that have not stopped are
/// killed. All Xen guests pause for this time at most.
pub const XEN_QUIESCE: Duration = Duration::from_millis(800);
/// After `XEN_QUIESCE`, the tasks of the disks end. Over: the disks are handed over as they are.
pub const XEN_HAND_OFF: Duration = Duration::from_millis(400);

// Xen.

/// Delay before the next attempt to connect to a lost xenstore, or to read a disk's nodes.
pub const XENSTORE_RETRY: Duration = Duration::from_secs(1);
/// Requests in flight end with the daemon. Over: the daemon exits.
pub const XEN_STOP: Duration = Duration::from_secs(1);
/// Delay before another device process is asked to serve a front-end.
pub const XEN_PROCESS_RETRY: Duration = Duration::from_millis(200);
/// Another process or disk releases a file. This is needed when a guest restarts: its new disk
/// appears before the old one is gone. Over: the disk is refused.
pub const XEN_FILE: Duration = Duration::from_secs(10);
/// Delay before the next attempt to open the file of a Xen disk.
pub const XEN_FILE_RETRY: Duration = Duration::from_millis(100);
/// A killed process releases an event channel. Over: the connection is refused.
pub const XEN_BIND: Duration = Duration::from_secs(2);
/// Delay before the next attempt to bind the event channel.
pub const XEN_BIND_RETRY: Duration = Duration::from_millis(20);
/// Longest time between two checks whether the journals of Xen rings exist and have their length.
pub const XEN_JOURNALS_LOOK: Duration = Duration::from_secs(1);
/// Shortest time between two checks of the journals.
pub const XEN_JOURNALS_MIN: Duration = Duration::from_millis(10);
/// An ending process releases the locks of the Xen disks. Over: the start fails.
pub const XEN_LOCKS: Duration = Duration::from_secs(5);
/// Delay before the next attempt to take the locks of the Xen disks.
pub const XEN_LOCKS_RETRY: Duration = Duration::from_millis(50);

// Log, service manager and the end of the daemon.

/// Workers end with the daemon. Over: the daemon exits while a worker hangs in a system call.
pub const WORKERS_END: Duration = Duration::from_millis(300);
/// Sockets that another thread is creating get their paths, so that these can be removed. Over: a
/// path is left behind.
pub const NAMES_END: Duration = Duration::from_secs(1);
/// The last log lines are written. Over: they are lost.
pub const LOG_FINISH: Duration = Duration::from_millis(300);
/// Standard error accepts the reason of a refused start. Over: the reason is lost.
pub const LOG_REFUSAL: Duration = Duration::from_secs(10);
/// A service manager reads the last message. Over: the message is lost.
pub const NOTIFY_LAST: Duration = Duration::from_secs(1);
/// The paths of passed sockets that no device uses are removed at the start. Over: the start
/// continues.
pub const SOCKETS_REMOVE: Duration = Duration::from_secs(1);
