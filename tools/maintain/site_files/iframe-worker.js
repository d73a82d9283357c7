// A page opened from a folder may not start a Worker. The search's script then runs in a hidden frame.
// Zensical adds a script from another host if none of ours has "iframe-worker" in its name.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      // cloned, as between a page and a Worker: the search changes the questions that it gets
      const cloned = (data) => ({ data: structuredClone(data) });
      inside.postMessage = (data) => {
        const message = cloned(data);
        setTimeout(() => this.onmessage?.(message));
      };
      this.send = (data) => {
        const message = cloned(data);
        this.started.then(() => inside.onmessage(message));
      };
      const script = inside.document.createElement("script");
      script.src = new URL(address, document.baseURI).href;
      this.started = new Promise((done, failed) => {
        script.onload = done;
        script.onerror = failed;
      });
      this.started.catch((error) => this.onerror?.(error));
      inside.document.body.append(script);
    }

    postMessage(data) {
      this.send(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
