//! Machines as text, built as folders that look like /sys, /proc and /dev.
//!
//! A line is a root complex (`pci0000:00`), a function, indented below its parent (`root`, `up`, `down`, `bridge`,
//! `nvme`, `gpu`, `other`, then its address and its traits), or `file PATH = CONTENT`. `user` at the beginning hides
//! the parts of configuration space that only root may read.

use nvme_driver::sysfs::testing::Tree;

/// Traits of a function, as `name=value`; `model=` comes last and takes all that follows on the line.
struct Traits<'t>(&'t str);

impl<'t> Traits<'t> {
    fn get(&self, name: &str) -> Option<&'t str> {
        let (words, model) = self.0.split_once("model=").unwrap_or((self.0, ""));
        if name == "model" {
            return Some(model.trim()).filter(|model| !model.is_empty());
        }
        let mut words = words.split_whitespace();
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }

    /// Returns generation and lanes of `link=TRAINED` or `link=TRAINED/CAPABLE`, which are written like 4x16.
    fn links(&self) -> Option<[(u8, u8); 2]> {
        let one = |text: &str| {
            let (generation, lanes) = text.split_once('x').unwrap();
            (generation.parse().unwrap(), lanes.parse().unwrap())
        };
        let text = self.get("link")?;
        let (trained, capable) = text.split_once('/').unwrap_or((text, text));
        Some([one(trained), one(capable)])
    }
}

/// Returns the machine that `text` describes.
pub fn build(text: &str) -> Tree {
    let tree = Tree::new();
    let is_user = text.lines().any(|line| line == "user");
    let mut above: Vec<(usize, String)> = Vec::new();
    for line in text.lines() {
        let words = line.trim_start();
        let indent = line.len() - words.len();
        if words.is_empty() || words.starts_with('#') || words == "user" {
            continue;
        }
        if let Some(file) = words.strip_prefix("file ") {
            let (path, content) = file.split_once(" = ").unwrap();
            tree.file(path, format!("{}\n", content.replace("\\n", "\n")));
            continue;
        }
        above.retain(|(other, _)| *other < indent);
        if words.starts_with("pci") {
            above.push((indent, words.to_owned()));
            continue;
        }
        let mut parts = words.splitn(3, ' ');
        let (kind, bdf) = (parts.next().unwrap(), parts.next().unwrap());
        let traits = Traits(parts.next().unwrap_or(""));
        let folders: Vec<&str> = above.iter().map(|(_, name)| name.as_str()).collect();
        tree.place_at(bdf, &folders);
        function(&tree, kind, bdf, &traits, is_user);
        above.push((indent, bdf.to_owned()));
    }
    tree
}

fn function(tree: &Tree, kind: &str, bdf: &str, traits: &Traits<'_>, is_user: bool) {
    let (class, port, id) = match kind {
        "root" => (0x06_04_00, 4, "8086:0000"),
        "up" => (0x06_04_00, 5, "10b5:8749"),
        "down" => (0x06_04_00, 6, "10b5:8749"),
        "bridge" => (0x06_04_00, 7, "1b21:1080"),
        "nvme" => (0x01_08_02, 0, "144d:a80a"),
        "gpu" => (0x03_02_00, 0, "10de:2330"),
        "other" => (0x02_00_00, 0, "8086:15f3"),
        _ => panic!("no kind of function is called {kind}"),
    };
    let (vendor, device) = traits.get("id").unwrap_or(id).split_once(':').unwrap();
    let hex = |text: &str| u16::from_str_radix(text, 16).unwrap();
    let mut config = Tree::config(hex(vendor), hex(device), class);
    config.resize(4096, 0);
    express(&mut config, port, traits.links());
    if let Some(acs) = traits.get("acs") {
        let acs = hex(acs.trim_start_matches("0x"));
        config[0x100..0x104].copy_from_slice(&[0x0D, 0, 1, 0]);
        config[0x106..0x108].copy_from_slice(&acs.to_le_bytes());
    }
    let folder = format!("sys/bus/pci/devices/{bdf}");
    if is_user {
        config.truncate(64);
    }
    match traits.get("group") {
        Some(group) => {
            let number: u32 = group.parse().unwrap();
            tree.function(bdf, &config, traits.get("driver").unwrap_or(""), number);
            let kind = traits.get("type").unwrap_or("DMA-FQ");
            tree.file(
                &format!("sys/kernel/iommu_groups/{number}/type"),
                format!("{kind}\n"),
            );
        }
        None => tree.without_group(bdf, &config, traits.get("driver").unwrap_or("")),
    }
    if let Some([trained, capable]) = traits.links() {
        for (name, (generation, lanes)) in [("current", trained), ("max", capable)] {
            let speed = ["2.5", "5.0", "8.0", "16.0", "32.0", "64.0"][usize::from(generation) - 1];
            tree.file(
                &format!("{folder}/{name}_link_speed"),
                format!("{speed} GT/s PCIe\n"),
            );
            tree.file(&format!("{folder}/{name}_link_width"), format!("{lanes}\n"));
        }
    }
    if let Some(node) = traits.get("node") {
        tree.file(&format!("{folder}/numa_node"), format!("{node}\n"));
    }
    if let Some(model) = traits.get("model") {
        match kind {
            "gpu" => tree.file(
                &format!("proc/driver/nvidia/gpus/{bdf}/information"),
                format!("Model: \t\t {model}\nGPU UUID: GPU-1\n"),
            ),
            _ => tree.file(
                &format!("{folder}/nvme/nvme0/model"),
                format!("{model}   \n"),
            ),
        }
    }
}

/// Writes the PCI Express capability at 80h.
fn express(config: &mut [u8], port: u8, links: Option<[(u8, u8); 2]>) {
    config[6] = 0x10;
    config[0x34] = 0x80;
    config[0x80] = 0x10;
    config[0x82..0x84].copy_from_slice(&(u16::from(port) << 4 | 2).to_le_bytes());
    let Some([trained, capable]) = links else {
        return;
    };
    let word = |(generation, lanes): (u8, u8)| u16::from(generation) | u16::from(lanes) << 4;
    config[0x8C..0x90].copy_from_slice(&u32::from(word(capable)).to_le_bytes());
    config[0x92..0x94].copy_from_slice(&word(trained).to_le_bytes());
}
